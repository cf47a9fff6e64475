//! What goes to stdout and stderr. A reader that went away (`| head`) is no error and no panic.

use crate::{
    exit::{Code, Failure},
    human,
};
use serde_json::{Value, json};
use std::{
    io::{self, Write},
    sync::atomic::{AtomicU8, Ordering},
};

/// Who says how the verb ended: it is said once.
static SAID: AtomicU8 = AtomicU8::new(NOBODY);
const NOBODY: u8 = 0;
const VERB: u8 = 1;
const SIGNAL: u8 = 2;

/// Whether it is for `who` to say.
fn says(who: u8) -> bool {
    let said = SAID.compare_exchange(NOBODY, who, Ordering::Relaxed, Ordering::Relaxed);
    said.is_ok() || said == Err(who)
}

/// Returns where it is for the verb to say; else another thread says so, and then ends this process.
fn say_or_end() {
    while !says(VERB) {
        std::thread::park();
    }
}

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether one JSON object is asked for.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// As [`fail`](Self::fail), from the thread that watches for signals: unless the verb has said how it ended already.
    pub(crate) fn fail_by_signal(self, failure: &Failure) -> Option<Code> {
        says(SIGNAL).then(|| self.print(failure))
    }

    /// The verb's result: the object, or the text that `human` makes.
    pub(crate) fn result(
        self,
        object: &impl serde::Serialize,
        human: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        say_or_end();
        if !self.json {
            return self.text(&human());
        }
        let mut text = serde_json::to_string(object)
            .map_err(|e| flashboot_core::Error::new(flashboot_core::Kind::Invalid, "json", e.to_string()))?;
        text.push('\n');
        write(&text)
    }

    /// Text for people; nothing with `--json`.
    pub(crate) fn text(self, text: &str) -> Result<(), Failure> {
        if self.json { Ok(()) } else { write(&human::plain(text, true)) }
    }

    /// Prints why a verb failed; its exit code.
    pub(crate) fn fail(self, failure: &Failure) -> Code {
        say_or_end();
        self.print(failure)
    }

    fn print(self, failure: &Failure) -> Code {
        // Nothing is left to try when neither stream takes it.
        if self.json {
            let mut object = failure.beside.clone();
            object.insert("error".into(), json!(failure.error));
            let _ = write(&format!("{}\n", Value::Object(object)));
        } else {
            // Usage may point into a file of several lines; elsewhere a line's end is some name's.
            let lines = failure.exit == 2;
            let _ = writeln!(io::stderr(), "flashboot: {}", human::plain(&failure.error.message, lines));
        }
        Code::from(failure.exit)
    }
}

fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(flashboot_core::Error::from_io("write", &e, "stdout").into())
        }
        _ => Ok(()),
    }
}
