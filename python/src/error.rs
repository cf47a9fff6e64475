//! Errors as Python's exceptions: one class a kind, in `flashboot.errors`.

use flashboot::ErrorWire;
use flashboot_core::Error;
use pyo3::prelude::*;

/// The exception that `error` is.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let ErrorWire { kind, op, detail, peer, chunk, code, remedy, message, .. } = ErrorWire::from(error);
    let made = py
        .import("flashboot.errors")
        .and_then(|errors| errors.getattr("_made"))
        .and_then(|made| made.call1((kind, message, op, detail, peer, chunk, code, remedy)));
    // Whatever keeps the class from being made says more than nothing.
    made.map_or_else(|e| e, PyErr::from_value)
}

/// A result whose error is raised.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|e| raised(py, &e.into()))
    }
}
