//! An arena by what it is made of, for transports that serve host memory and GPUs'.

use crate::CudaArena;
use flashboot_core::{Arena, Error, Kind, MemoryKind, Result};
use flashboot_memory::HostArena;
use std::{any::Any, sync::Arc};

/// An arena by what it is made of.
#[derive(Debug, Clone)]
pub enum Served {
    /// In host memory.
    Host(Arc<HostArena>),
    /// In a GPU's memory.
    Gpu(Arc<CudaArena>),
}

impl Served {
    /// `arena` as what it is.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for an arena of neither kind, which `transport` does not serve.
    pub fn of(arena: &Arc<dyn Arena>, transport: &'static str) -> Result<Self> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
        if let Ok(host) = any.downcast() {
            return Ok(Self::Host(host));
        }
        CudaArena::from_arena(arena).map(Self::Gpu).ok_or_else(|| {
            let detail = format!(
                "{arena:?} is neither a host arena of flashboot-memory nor a GPU arena of flashboot-cuda"
            );
            Error::new(Kind::Invalid, transport, detail).with_remedy("allow another transport for this arena")
        })
    }

    /// It as any other.
    pub fn arena(&self) -> &dyn Arena {
        match self {
            Self::Host(arena) => &**arena,
            Self::Gpu(arena) => &**arena,
        }
    }

    /// Which memory it lies in.
    pub fn memory(&self) -> MemoryKind {
        match self {
            Self::Host(_) => MemoryKind::Host,
            Self::Gpu(_) => MemoryKind::Gpu,
        }
    }
}
