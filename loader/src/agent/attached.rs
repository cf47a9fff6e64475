//! What an engine does with memory that is the agent's: reads it into its own, or uses it where it is.

use super::client::{Attached, Client};
use crate::{
    io::{Each, Lane},
    pipeline::{Full, Producer},
};
use flashboot_core::{Arena, ByteRange, Error, Generation, Kind, Location, Locator, Result, TransportName};
use flashboot_cuda::{Attach, Context, CudaArena};
use flashboot_memory::{AttachedArena, Expected, ImportedArena, boot_id};
use std::{any::Any, os::fd::AsFd as _, sync::Arc};

/// Bytes copied and hashed at a time: they stay in a core's cache between the two.
const PIECE: usize = 256 << 10;

/// Which memory a load goes into.
#[derive(Debug, Clone)]
pub enum Target {
    /// The host's.
    Host,
    /// A GPU's.
    Gpu(Context),
}

/// A payload that lies in memory which another process owns.
#[derive(Debug)]
pub struct AttachedProducer(Arc<ImportedArena>);

impl AttachedProducer {
    /// Maps what the agent attached.
    ///
    /// # Errors
    /// Those of [`ImportedArena::map`].
    pub fn map(attached: Attached) -> Result<Self> {
        let Attached { descriptor, payload, capacity, shards, .. } = attached;
        ImportedArena::map(descriptor, Expected { payload, capacity, shards }).map(Arc::new).map(Self)
    }

    /// The same memory, to be pinned where it is.
    pub(super) fn full(&self) -> Full {
        Full::Attached(Arc::clone(&self.0))
    }
}

impl Producer for AttachedProducer {
    fn produce(&self, _: &mut Lane, unit: ByteRange, into: &mut [u8], each: &mut Each<'_>) -> Result<()> {
        let mut at = 0;
        for piece in into.chunks_mut(PIECE) {
            self.0.copy_out(unit.start.saturating_add(at as u64), piece)?;
            each(at, piece)?;
            at += piece.len();
        }
        Ok(())
    }
}

/// Uses it where it is; `client` is kept for as long as that lasts, so that the agent knows.
pub(super) fn in_place(attached: Attached, client: Client, target: &Target) -> Result<Arc<dyn Arena>> {
    let keep: Option<Arc<dyn Any + Send + Sync>> = Some(Arc::new(client));
    let Attached { descriptor, payload, capacity, shards, generation } = attached;
    match target {
        Target::Host => {
            let expected = Expected { payload, capacity, shards };
            Ok(AttachedArena::map(descriptor, expected, generation, keep)?)
        }
        Target::Gpu(context) => {
            let locator = locator(context, (payload, capacity, shards), generation)?;
            Ok(CudaArena::attach(context, descriptor.as_fd(), &locator, Attach::Read, keep)?)
        }
    }
}

/// What is said of an arena in this context's GPU to whom its descriptor is given.
pub(super) fn locator(
    context: &Context,
    (payload, capacity, shards): (u64, u64, u32),
    generation: Generation,
) -> Result<Locator> {
    Ok(Locator {
        transport: TransportName::Ipc,
        generation,
        payload,
        capacity,
        shards,
        location: Location::Gpu { boot_id: boot_id()?, uuid: context.device().uuid().to_owned() },
        endpoint: String::new(),
    })
}

/// Refuses memory of another length.
pub(super) fn fits(attached: &Attached, payload: u64) -> Result<()> {
    if attached.payload == payload {
        return Ok(());
    }
    let detail = format!("the agent has {} bytes, {payload} are wanted", attached.payload);
    Err(Error::new(Kind::Mismatch, "attach", detail))
}
