//! The `flashboot` command: reads its configuration, runs one verb, prints what came of it. A library for who begins it in
//! another way than by its own file, as the Python package does; nothing else is to be used of it.
//!
//! Exit codes: 0 done, 1 failed (also: `diff` found a difference), 2 bad usage, 3 refused (a mismatch, damage, or
//! no permission). With `--json` exactly one object is on stdout, whatever happens.
#![forbid(unsafe_code)]

mod again;
mod args;
mod demo;
mod exit;
mod human;
mod interrupt;
mod logs;
mod output;
mod program;
mod progress;
mod settings;
mod table;
mod verbs;

use args::Cli;
use clap::Parser as _;
pub use exit::Code;
use exit::Failure;
use output::Output;
pub use program::Program;
use std::ffi::OsString;

/// Runs the verb that `arguments` name, of which the first is the program's own name. The process is the program's from then on:
/// its signals are, and its log. `program` begins it again, for ranks that are processes.
pub fn run(program: Program, arguments: Vec<OsString>) -> Code {
    program::begin(program, &arguments);
    // Known before the arguments are: a usage error is an object too.
    let json = arguments.iter().skip(1).take_while(|a| *a != "--").any(|a| a == "--json");
    let output = Output::new(json);
    // A worker's end is its parent's to tell.
    if arguments.get(1).is_none_or(|verb| verb != "worker") {
        interrupt::begin(output);
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() && json => return output.fail(&Failure::usage(clap_message(&e))),
        Err(e) => {
            // Help and version go to stdout with 0, errors to stderr with 2; a closed pipe is no reason to fail.
            let _ = e.print();
            return Code::from(if e.use_stderr() { 2 } else { 0 });
        }
    };
    match verbs::run(cli, output) {
        Ok(code) => code,
        Err(failure) => output.fail(&failure),
    }
}

/// Clap's message without its colours and its help.
fn clap_message(e: &clap::Error) -> String {
    let text = e.render().to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let said =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let text = said.collect::<Vec<_>>().join(" ");
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}
