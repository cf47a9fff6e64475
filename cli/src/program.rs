//! How this program is begun: by its own file, or by an interpreter that has it as a library.

use std::{ffi::OsString, io, path::PathBuf, sync::OnceLock};

/// What begins the program again; its own arguments follow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Program {
    /// The file that runs; `None`: this one.
    pub path: Option<PathBuf>,
    /// What stands before the program's own arguments.
    pub arguments: Vec<OsString>,
}

impl Program {
    /// This file.
    pub fn own() -> Self {
        Self::default()
    }
}

/// The program, and the arguments it was begun with, without its name.
static BEGUN: OnceLock<(Program, Vec<OsString>)> = OnceLock::new();

/// Remembers how this process was begun; the first time counts.
pub(crate) fn begin(program: Program, arguments: &[OsString]) {
    let own = arguments.iter().skip(1).cloned().collect();
    BEGUN.get_or_init(|| (program, own));
}

/// The file to begin another process with, and what stands before its arguments.
pub(crate) fn other() -> io::Result<(PathBuf, Vec<OsString>)> {
    match BEGUN.get() {
        Some((Program { path: Some(path), arguments }, _)) => Ok((path.clone(), arguments.clone())),
        _ => Ok((std::env::current_exe()?, Vec::new())),
    }
}

/// The file to begin this process anew with, and all of its arguments but the program's own.
pub(crate) fn same() -> (PathBuf, Vec<OsString>) {
    match BEGUN.get() {
        Some((Program { path: Some(path), arguments }, _)) => (path.clone(), arguments.clone()),
        // What runs, also where its file was replaced meanwhile.
        _ => ("/proc/self/exe".into(), Vec::new()),
    }
}

/// The program's own arguments.
pub(crate) fn arguments() -> Vec<OsString> {
    BEGUN.get().map_or_else(Vec::new, |(_, own)| own.clone())
}
