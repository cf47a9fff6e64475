//! Reports as Python's dictionaries, dictionaries as settings, and texts as what they name.

use crate::error::raised;
use flashboot_core::{Error, Kind};
use pyo3::prelude::*;
use serde::{Serialize, de::DeserializeOwned};
use std::str::FromStr;

/// A report as dictionaries, lists, texts and numbers.
pub(crate) fn object(py: Python<'_>, report: &impl Serialize) -> PyResult<Py<PyAny>> {
    let text = serde_json::to_string(report).map_err(|e| invalid(py, "json", &e))?;
    Ok(py.import("json")?.call_method1("loads", (text,))?.unbind())
}

/// Settings out of a dictionary.
pub(crate) fn settings<T: DeserializeOwned>(dictionary: &Bound<'_, PyAny>) -> PyResult<T> {
    let py = dictionary.py();
    let text: String = py.import("json")?.call_method1("dumps", (dictionary,))?.extract()?;
    serde_json::from_str(&text).map_err(|e| invalid(py, "config", &e))
}

/// What a text names.
pub(crate) fn parsed<T: FromStr<Err: std::fmt::Display>>(
    py: Python<'_>,
    what: &'static str,
    text: &str,
) -> PyResult<T> {
    text.parse().map_err(|e: T::Err| invalid(py, what, &e))
}

/// Arguments that cannot work.
pub(crate) fn invalid(py: Python<'_>, op: &'static str, why: &dyn std::fmt::Display) -> PyErr {
    raised(py, &Error::new(Kind::Invalid, op, why.to_string()))
}
