//! Logs to stderr.

use crate::exit::Failure;
use flashboot::config::{Log, LogFormat};
use std::io;
use tracing_subscriber::{EnvFilter, fmt};

/// Installs the subscriber; `verbose` counts `-v`.
pub(crate) fn install(log: &Log) -> Result<(), Failure> {
    let filter = EnvFilter::builder()
        .parse(&log.level)
        .map_err(|e| Failure::usage(format!("log.level `{}` is not a filter: {e}", log.level)))?;
    let lines = fmt().with_env_filter(filter).with_writer(io::stderr);
    // Fails only when there is one already: this is called once.
    let _ = match log.format {
        LogFormat::Text => lines.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
    Ok(())
}
