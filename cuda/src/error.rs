//! A failed driver call, and what a person can do about it.

use flashboot_core::{Code, Error, Kind};
use std::fmt;

/// A driver call that did not return `CUDA_SUCCESS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaError {
    /// The function, as NVIDIA's manual lists it.
    pub call: &'static str,
    /// Its `CUresult`.
    pub code: u32,
}

/// The `CUresult` values this crate decides on (`cuda.h`).
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_INITIALIZED: u32 = 3;
    pub(crate) const DEINITIALIZED: u32 = 4;
    pub(crate) const STUB_LIBRARY: u32 = 34;
    pub(crate) const DEVICE_UNAVAILABLE: u32 = 46;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const DEVICE_NOT_LICENSED: u32 = 102;
    pub(crate) const INVALID_IMAGE: u32 = 200;
    pub(crate) const INVALID_CONTEXT: u32 = 201;
    pub(crate) const NO_BINARY_FOR_GPU: u32 = 209;
    pub(crate) const ECC_UNCORRECTABLE: u32 = 214;
    pub(crate) const PEER_ACCESS_UNSUPPORTED: u32 = 217;
    pub(crate) const INVALID_PTX: u32 = 218;
    pub(crate) const NVLINK_UNCORRECTABLE: u32 = 220;
    pub(crate) const UNSUPPORTED_PTX_VERSION: u32 = 222;
    pub(crate) const CONTAINED: u32 = 226;
    pub(crate) const OPERATING_SYSTEM: u32 = 304;
    pub(crate) const INVALID_HANDLE: u32 = 400;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
    pub(crate) const LAUNCH_TIMEOUT: u32 = 702;
    pub(crate) const CONTEXT_IS_DESTROYED: u32 = 709;
    pub(crate) const ASSERT: u32 = 710;
    pub(crate) const HARDWARE_STACK_ERROR: u32 = 714;
    pub(crate) const LAUNCH_FAILED: u32 = 719;
    pub(crate) const TENSOR_MEMORY_LEAK: u32 = 721;
    pub(crate) const NOT_PERMITTED: u32 = 800;
    pub(crate) const NOT_SUPPORTED: u32 = 801;
    pub(crate) const SYSTEM_NOT_READY: u32 = 802;
    pub(crate) const SYSTEM_DRIVER_MISMATCH: u32 = 803;
    pub(crate) const COMPAT_NOT_SUPPORTED: u32 = 804;
    pub(crate) const MPS_CLIENT_TERMINATED: u32 = 810;
    pub(crate) const EXTERNAL_DEVICE: u32 = 911;
    pub(crate) const UNKNOWN: u32 = 999;
}

impl CudaError {
    /// The error's name in `cuda.h`, for the ones we meet.
    pub fn name(self) -> Option<&'static str> {
        Some(match self.code {
            code::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            code::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            code::NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            code::DEINITIALIZED => "CUDA_ERROR_DEINITIALIZED",
            code::STUB_LIBRARY => "CUDA_ERROR_STUB_LIBRARY",
            code::DEVICE_UNAVAILABLE => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            code::NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            code::INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
            code::DEVICE_NOT_LICENSED => "CUDA_ERROR_DEVICE_NOT_LICENSED",
            code::INVALID_IMAGE => "CUDA_ERROR_INVALID_IMAGE",
            code::INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
            code::NO_BINARY_FOR_GPU => "CUDA_ERROR_NO_BINARY_FOR_GPU",
            code::ECC_UNCORRECTABLE => "CUDA_ERROR_ECC_UNCORRECTABLE",
            code::PEER_ACCESS_UNSUPPORTED => "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            code::INVALID_PTX => "CUDA_ERROR_INVALID_PTX",
            code::NVLINK_UNCORRECTABLE => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            code::UNSUPPORTED_PTX_VERSION => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            code::OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
            code::INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
            code::NOT_READY => "CUDA_ERROR_NOT_READY",
            code::ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
            code::LAUNCH_TIMEOUT => "CUDA_ERROR_LAUNCH_TIMEOUT",
            code::CONTEXT_IS_DESTROYED => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            code::HARDWARE_STACK_ERROR => "CUDA_ERROR_HARDWARE_STACK_ERROR",
            code::LAUNCH_FAILED => "CUDA_ERROR_LAUNCH_FAILED",
            code::CONTAINED => "CUDA_ERROR_CONTAINED",
            code::NOT_PERMITTED => "CUDA_ERROR_NOT_PERMITTED",
            code::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            code::SYSTEM_NOT_READY => "CUDA_ERROR_SYSTEM_NOT_READY",
            code::SYSTEM_DRIVER_MISMATCH => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            code::COMPAT_NOT_SUPPORTED => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            code::MPS_CLIENT_TERMINATED => "CUDA_ERROR_MPS_CLIENT_TERMINATED",
            code::EXTERNAL_DEVICE => "CUDA_ERROR_EXTERNAL_DEVICE",
            code::UNKNOWN => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }

    /// Whether the context is beyond use: every later call fails, and only a new process helps. These are the codes
    /// of which the manual says so, and that of a context that is gone.
    pub fn is_sticky(self) -> bool {
        matches!(
            self.code,
            code::ECC_UNCORRECTABLE
                | code::NVLINK_UNCORRECTABLE
                | code::CONTAINED
                | code::ILLEGAL_ADDRESS
                | code::LAUNCH_TIMEOUT
                | code::CONTEXT_IS_DESTROYED
                | code::ASSERT
                | code::HARDWARE_STACK_ERROR
                ..=code::LAUNCH_FAILED
                    | code::TENSOR_MEMORY_LEAK
                    | code::MPS_CLIENT_TERMINATED
                    | code::EXTERNAL_DEVICE
        )
    }

    fn kind(self) -> Kind {
        match self.code {
            code::OUT_OF_MEMORY => Kind::Exhausted,
            code::NOT_PERMITTED => Kind::Permission,
            code::INVALID_VALUE | code::INVALID_HANDLE => Kind::Invalid,
            code::STUB_LIBRARY
            | code::NO_DEVICE
            | code::INVALID_DEVICE
            | code::DEVICE_UNAVAILABLE
            | code::NOT_SUPPORTED
            | code::SYSTEM_NOT_READY
            | code::SYSTEM_DRIVER_MISMATCH
            | code::PEER_ACCESS_UNSUPPORTED
            | code::COMPAT_NOT_SUPPORTED => Kind::Unavailable,
            _ if self.is_sticky() => Kind::ContextLost,
            _ => Kind::Io,
        }
    }

    /// What helps where the code means something else at this call than elsewhere.
    fn remedy_of_call(self) -> Option<&'static str> {
        Some(match (self.call, self.code) {
            // What is pinned is the host's memory, and no GPU's.
            ("cuMemHostAlloc" | "cuMemHostRegister", code::OUT_OF_MEMORY) => {
                "free host memory, or raise the limit on locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container) and on the control group's memory"
            }
            ("cuMemAddressReserve", code::OUT_OF_MEMORY) => {
                "raise the limit on this process's address space (ulimit -v unlimited)"
            }
            ("cuInit", code::OPERATING_SYSTEM) => {
                "see that /dev/nvidiactl, /dev/nvidia-uvm and the GPUs' own devices are there and open for this user (nvidia-smi and nvidia-modprobe -u make them; give them to the container)"
            }
            ("cuInit", code::UNKNOWN) => {
                "load nvidia-uvm (nvidia-modprobe -u) and see dmesg for what the NVIDIA kernel module says"
            }
            ("cuInit", code::INVALID_DEVICE) => {
                "correct CUDA_VISIBLE_DEVICES: it names a GPU twice, or one that is not there"
            }
            (_, code::NOT_INITIALIZED) => {
                "see nvidia-smi and dmesg; a process that was forked after CUDA was used must start a program of its own (exec, spawn)"
            }
            ("cuMemImportFromShareableHandle", code::UNKNOWN | code::INVALID_HANDLE) => {
                "see that the peer lives and that both ends have the same driver, and fetch its locator again"
            }
            ("cuMemSetAccess", code::INVALID_DEVICE | code::PEER_ACCESS_UNSUPPORTED) => {
                "use GPUs with NVLink or PCIe peer access (nvidia-smi topo -p2p r), or allow another transport"
            }
            _ => return None,
        })
    }

    fn remedy(self) -> Option<&'static str> {
        if let Some(remedy) = self.remedy_of_call() {
            return Some(remedy);
        }
        Some(match self.code {
            code::OUT_OF_MEMORY => "free GPU memory (nvidia-smi shows who holds it) or choose another GPU",
            code::STUB_LIBRARY => {
                "the libcuda found is the toolkit's stub: take its directory off LD_LIBRARY_PATH"
            }
            code::NO_DEVICE => {
                "make a GPU visible to this process (CUDA_VISIBLE_DEVICES, the container's devices)"
            }
            code::SYSTEM_NOT_READY => {
                "start nvidia-fabricmanager and wait until nvidia-smi -q shows Fabric: Completed"
            }
            code::SYSTEM_DRIVER_MISMATCH => {
                "reboot or reload the NVIDIA kernel module: it differs from libcuda"
            }
            code::DEVICE_UNAVAILABLE => {
                "another process has the GPU exclusively: see its compute mode in nvidia-smi"
            }
            _ if self.is_sticky() => {
                "restart this process and let it join again: its GPU context is beyond use (see dmesg for the Xid)"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{}: {name} ({})", self.call, self.code),
            None => write!(f, "{}: CUresult {}", self.call, self.code),
        }
    }
}

impl std::error::Error for CudaError {}

impl From<CudaError> for Error {
    fn from(e: CudaError) -> Self {
        let detail = e.name().unwrap_or("failed");
        let error = Self::new(e.kind(), e.call, detail).with_code(Code::Cuda(e.code));
        match e.remedy() {
            Some(remedy) => error.with_remedy(remedy),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u32) -> CudaError {
        CudaError { call: "cuEventQuery", code }
    }

    #[test]
    fn what_poisons_a_context_is_its_loss_and_says_to_restart() {
        for code in [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911] {
            let lost: Error = error(code).into();
            assert_eq!(lost.kind(), Kind::ContextLost, "{code}");
            assert!(lost.remedy().is_some_and(|remedy| remedy.contains("restart this process")), "{lost}");
        }
    }

    /// A code says where to look only together with its call.
    #[test]
    fn the_same_code_has_another_remedy_at_another_call() {
        for (call, code, words) in [
            ("cuMemCreate", 2, "GPU memory"),
            ("cuMemHostAlloc", 2, "locked memory"),
            ("cuMemHostRegister", 2, "locked memory"),
            ("cuMemAddressReserve", 2, "address space"),
            ("cuInit", 304, "/dev/nvidiactl"),
            ("cuInit", 999, "nvidia-uvm"),
            ("cuInit", 101, "CUDA_VISIBLE_DEVICES"),
            ("cuInit", 3, "forked"),
            ("cuInit", 100, "make a GPU visible"),
            ("cuMemImportFromShareableHandle", 999, "fetch its locator again"),
            ("cuMemSetAccess", 101, "peer access"),
        ] {
            let error: Error = CudaError { call, code }.into();
            assert!(error.remedy().is_some_and(|remedy| remedy.contains(words)), "{error}");
        }
        for call in ["cuMemHostAlloc", "cuMemHostRegister", "cuMemAddressReserve"] {
            let error: Error = CudaError { call, code: 2 }.into();
            assert!(!error.remedy().unwrap_or_default().contains("GPU memory"), "{error}");
            assert_eq!(error.kind(), Kind::Exhausted);
        }
        assert_eq!(Error::from(CudaError { call: "cuEventQuery", code: 999 }).remedy(), None);
    }

    /// Among them what lies between sticky ones: too many resources, peer access, registered memory.
    #[test]
    fn what_only_refuses_one_call_does_not_end_a_process() {
        for code in [1, 2, 46, 400, 600, 701, 703, 704, 705, 708, 711, 712, 713, 720, 800, 801, 806, 999] {
            assert!(!error(code).is_sticky(), "{code}");
            assert_ne!(Error::from(error(code)).kind(), Kind::ContextLost, "{code}");
        }
    }
}
