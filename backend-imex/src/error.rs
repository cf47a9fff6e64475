//! What the driver's refusal of a fabric handle means, and errors as readiness.

use flashboot_core::{Code, Error, Kind, Readiness};

/// `CUresult` values that `cuMemImportFromShareableHandle` is known to give (`cuda.h`).
mod code {
    pub(super) const INVALID_VALUE: u32 = 1;
    pub(super) const INVALID_HANDLE: u32 = 400;
    pub(super) const NOT_PERMITTED: u32 = 800;
    pub(super) const NOT_SUPPORTED: u32 = 801;
}

/// A failed import, with what it says of the source. Never seen on IMEX hardware: from documentation and the stand-in.
pub(crate) fn import(error: Error) -> Error {
    if error.op() != "cuMemImportFromShareableHandle" {
        return error;
    }
    let Some(Code::Cuda(number)) = error.code() else { return error };
    let (kind, meaning, remedy) = match number {
        code::INVALID_HANDLE | code::INVALID_VALUE => (
            Kind::SourceLost,
            "the handle names no memory of this NVLink domain, or none any more",
            "check that the exporter runs, in the same domain (nvidia-imex-ctl -N), and fetch its locator again",
        ),
        code::NOT_PERMITTED => (
            Kind::Permission,
            "this process has no IMEX channel in common with the exporter",
            "give it the channel's device (/dev/nvidia-caps-imex-channels) and run nvidia-imex on both hosts",
        ),
        code::NOT_SUPPORTED => (
            Kind::Unavailable,
            "this driver takes no fabric handles",
            "use ipc on one host and rdma between hosts",
        ),
        _ => return error,
    };
    let detail = format!("{}: {meaning}", error.detail());
    Error::new(kind, error.op(), detail).with_code(Code::Cuda(number)).with_remedy(remedy)
}

pub(crate) fn unavailable(e: &Error) -> Readiness {
    let code = e.code().map(|code| format!(" ({code})")).unwrap_or_default();
    Readiness::Unavailable {
        reason: format!("{}: {}{code}", e.op(), e.detail()),
        remedy: e.remedy().unwrap_or("see the reason").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_handle_says_what_it_means() {
        let refused = |op, number| {
            import(Error::new(Kind::Io, op, "CUDA_ERROR_X").with_code(Code::Cuda(number))).kind()
        };
        assert_eq!(refused("cuMemImportFromShareableHandle", 400), Kind::SourceLost);
        assert_eq!(refused("cuMemImportFromShareableHandle", 800), Kind::Permission);
        assert_eq!(refused("cuMemImportFromShareableHandle", 801), Kind::Unavailable);
        assert_eq!(refused("cuMemImportFromShareableHandle", 999), Kind::Io);
        assert_eq!(refused("cuMemMap", 400), Kind::Io);
    }
}
