//! What no program may do to a driver ends the process, with words.

/// Prints and aborts.
pub(crate) fn stop(what: &str) -> ! {
    eprintln!("flashboot-cuda-sim: {what}");
    std::process::abort();
}
