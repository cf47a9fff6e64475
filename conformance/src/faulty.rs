//! A decorator that makes any transport unlucky.

use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Export, Generation, Geometry, HandleExchange, InFlight, Kind, Landed, Locator, Mover,
    Observed, Pull, Result, ShardId, digest,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// What happens to one pull, counted from 0 over all movers of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misfortune {
    /// A byte in the middle is flipped on the way.
    Corrupt,
    /// It fails after it has quiesced, with everything in place or not.
    Fail,
    /// It fails as where the reader's own GPU context is lost: no source is to blame, and none can help.
    ContextLost,
    /// It takes this much longer to be quiet.
    Late(Duration),
}

/// Wraps an endpoint: the pulls named in `plan` meet their misfortune, all others pass through.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn HandleExchange>,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    pulls: AtomicU64,
    misfortunes: Vec<(u64, Misfortune)>,
}

impl Faulty {
    /// `misfortunes` are (which pull, what happens).
    pub fn new(inner: Arc<dyn HandleExchange>, misfortunes: Vec<(u64, Misfortune)>) -> Self {
        Self { inner, plan: Arc::new(Plan { pulls: AtomicU64::new(0), misfortunes }) }
    }
}

#[async_trait]
impl HandleExchange for Faulty {
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>> {
        self.inner.export(arena, timeout).await
    }

    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let inner = self.inner.import(locator, Arc::clone(&into), timeout).await?;
        Ok(Box::new(FaultyMover { inner, into, plan: Arc::clone(&self.plan) }))
    }
}

#[derive(Debug)]
struct FaultyMover {
    inner: Box<dyn Mover>,
    into: Arc<dyn Arena>,
    plan: Arc<Plan>,
}

#[async_trait]
impl Mover for FaultyMover {
    fn generation(&self) -> Generation {
        self.inner.generation()
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        self.inner.observe(shard, at_least, wait).await
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        let inner = self.inner.start(pull)?;
        let number = self.plan.pulls.fetch_add(1, Ordering::Relaxed);
        match self.plan.misfortunes.iter().find(|(at, _)| *at == number) {
            None => Ok(inner),
            Some(&(_, misfortune)) => Ok(Box::new(FaultyInFlight {
                inner,
                into: Arc::clone(&self.into),
                pull,
                misfortune,
                result: None,
            })),
        }
    }

    fn remarks(&self) -> Vec<String> {
        self.inner.remarks()
    }
}

struct FaultyInFlight {
    inner: Box<dyn InFlight>,
    into: Arc<dyn Arena>,
    pull: Pull,
    misfortune: Misfortune,
    result: Option<Result<Landed>>,
}

impl FaultyInFlight {
    /// Flips a byte of the arena and hashes again what is there now.
    fn corrupt(&self) -> Landed {
        let range = self.pull.range;
        let mut bytes = vec![0; range.len() as usize];
        self.into.copy_out(range.start, &mut bytes).expect("quiet");
        let middle = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(middle) {
            *byte ^= 1;
            self.into.copy_in(range.start + middle as u64, &[*byte]).expect("quiet");
        }
        let Some(block) = self.pull.hash else { return Landed::default() };
        let geometry = Geometry::new(self.into.payload(), block, block, 1).expect("a block");
        let digests = geometry.blocks_of(range).map(|index| {
            let at = geometry.block_range(index);
            let bytes = &bytes[(at.start - range.start) as usize..(at.end - range.start) as usize];
            digest::block(&geometry, index, bytes)
        });
        Landed { digests: digests.collect(), generation: None }
    }
}

#[async_trait]
impl InFlight for FaultyInFlight {
    fn cancel(&self) {
        self.inner.cancel();
    }

    async fn quiesced(&mut self) -> Result<Landed> {
        if let Some(result) = &self.result {
            return result.clone();
        }
        let landed = self.inner.quiesced().await;
        let result = match (self.misfortune, landed) {
            (Misfortune::Corrupt, Ok(_)) => Ok(self.corrupt()),
            (Misfortune::Fail, _) => Err(Error::new(Kind::Io, "faulty", "an injected failure")),
            (Misfortune::ContextLost, _) => {
                let error = Error::new(Kind::ContextLost, "faulty", "an injected loss of the context");
                Err(error.with_remedy("restart this process"))
            }
            (Misfortune::Late(by), landed) => {
                tokio::time::sleep(by).await;
                landed
            }
            (_, Err(e)) => Err(e),
        };
        self.result.insert(result).clone()
    }
}
