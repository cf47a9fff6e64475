//! Progress bars: on a terminal, never in a pipe and never with `--json`.

use crate::{interrupt, output::Output};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, stderr};

/// One bar of bytes; invisible where nobody would see it.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    pub(crate) fn new(output: Output, what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
        if output.is_json() || !stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        // A template that does not parse leaves the default one.
        if let Ok(style) =
            ProgressStyle::with_template("{msg:10} [{bar:40}] {bytes}/{total_bytes} {binary_bytes_per_sec}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what);
        Self(bar)
    }
}

impl flashboot_checkpoint::Progress for Bar {
    fn advance(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    fn cancelled(&self) -> bool {
        interrupt::asked()
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
