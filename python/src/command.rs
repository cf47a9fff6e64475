//! `command`: the `flashboot` program, run in this process.

use flashboot_cli::{Program, run};
use pyo3::prelude::*;
use std::{ffi::OsString, path::PathBuf};

/// Runs the program with `arguments`, the first of which is its name; what it ends with. `path` and `leading` begin it again, for
/// ranks that are processes. The process's signals are the program's from then on.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, path: PathBuf, leading: Vec<OsString>, arguments: Vec<OsString>) -> u8 {
    py.detach(move || run(Program { path: Some(path), arguments: leading }, arguments).number())
}
