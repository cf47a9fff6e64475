//! The extension module `flashboot._flashboot`: the facade's calls for the Python package, which gives them names and types.
//!
//! Owns: turning arguments, errors and reports into Python's, giving the interpreter lock away while a call blocks, and the one
//! place where memory is shown to Python ([`edge`]).
//!
//! Must never: decide anything the facade decides, hold the interpreter's lock while it waits, keep a runtime or a thread that a
//! forked child would miss, or show memory that could go or change while it is seen.

mod arena;
mod blocking;
mod capture;
mod command;
mod edge;
mod error;
mod file;
mod image;
mod load;
mod seed;
mod stream;
mod text;

use pyo3::prelude::*;

/// The module. What begins with an underscore is the package's own business.
#[pymodule]
fn _flashboot(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<file::File>()?;
    module.add_class::<file::Block>()?;
    module.add_class::<image::Image>()?;
    module.add_class::<seed::Seed>()?;
    module.add_class::<stream::Stream>()?;
    module.add_function(wrap_pyfunction!(stream::stream, module)?)?;
    module.add_function(wrap_pyfunction!(load::load, module)?)?;
    module.add_function(wrap_pyfunction!(load::attach, module)?)?;
    module.add_function(wrap_pyfunction!(load::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(seed::seed, module)?)?;
    module.add_function(wrap_pyfunction!(command::command, module)?)?;
    module.add_function(wrap_pyfunction!(capture::capture, module)?)?;
    module.add_function(wrap_pyfunction!(capture::compact, module)?)?;
    Ok(())
}
