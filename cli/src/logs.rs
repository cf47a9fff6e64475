//! Logs to stderr.

use crate::exit::Failure;
use flashboot::config::{Log, LogFormat};
use std::io;
use tracing_subscriber::{EnvFilter, filter::LevelFilter, fmt};

/// Installs the subscriber; `verbose` counts `-v`.
pub(crate) fn install(log: &Log) -> Result<(), Failure> {
    let filter = EnvFilter::builder()
        .parse(&log.level)
        .map_err(|e| Failure::usage(format!("log.level `{}` is not a filter: {e}", log.level)))?;
    if let Some(word) = no_level(&log.level) {
        return Err(Failure::usage(format!(
            "log.level: `{word}` is no level (off, error, warn, info, debug, trace), and as a target it lacks one: `{word}=debug`"
        )));
    }
    let lines = fmt().with_env_filter(filter).with_writer(io::stderr);
    // Fails only when there is one already: this is called once.
    let _ = match log.format {
        LogFormat::Text => lines.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
    Ok(())
}

/// The first word of a filter that is neither a level nor says one. The parser takes it for a target of which everything is
/// logged, and so a level with a slip silences everything else.
fn no_level(filter: &str) -> Option<&str> {
    let mut words = filter.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.find(|word| !word.contains(['=', '[', ']', '}']) && word.parse::<LevelFilter>().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_found() {
        assert_eq!(no_level("banana"), Some("banana"));
        assert_eq!(no_level("warn,inof"), Some("inof"));
        for filter in
            ["", "info", "WARN", "off", "warn,flashboot_cuda=debug", "[chunk{index=3,rank=1}]=trace"]
        {
            assert_eq!(no_level(filter), None, "{filter}");
        }
    }
}
