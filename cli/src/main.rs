//! The `flashboot` command, as a file of its own.
#![forbid(unsafe_code)]

use flashboot_cli::{Program, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    run(Program::own(), std::env::args_os().collect()).into()
}
