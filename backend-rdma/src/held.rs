//! A queue pair that finds its way back to its device.

use crate::{
    rail::Rail,
    verbs::{Call, Pair},
    wire::Address,
};
use flashboot_core::{Error, Kind, Result};
use std::sync::Arc;

/// A queue pair in its first state, with the number of the first packet that it will send.
#[derive(Debug)]
pub(crate) struct Held {
    rail: Arc<Rail>,
    /// The device's place among the endpoint's.
    pub(crate) number: usize,
    pair: Option<Pair>,
    psn: u32,
}

impl Held {
    pub(crate) fn new(rail: &Arc<Rail>, number: usize) -> Result<Self> {
        let psn = getrandom::u32()
            .map_err(|e| Error::new(Kind::Io, "getrandom", format!("no random packet number: {e}")))?;
        Ok(Self { rail: Arc::clone(rail), number, pair: Some(rail.pair()?), psn: psn & 0xff_ffff })
    }

    pub(crate) fn rail(&self) -> &Rail {
        &self.rail
    }

    pub(crate) fn address(&self) -> Option<Address> {
        self.pair.as_ref().map(|pair| self.rail.address(pair, self.psn))
    }

    /// Connects it to the peer's.
    pub(crate) fn connect(&self, to: &Address) -> Result<()> {
        match &self.pair {
            Some(pair) => self.rail.connect(pair, self.psn, to),
            None => Ok(()),
        }
    }

    pub(crate) fn pair(&self) -> Option<&Pair> {
        self.pair.as_ref()
    }

    /// Destroys it, whatever is posted on it. Where that fails it is there for ever: a device may still use it.
    pub(crate) fn destroy(mut self) -> Call<()> {
        let Some(pair) = &mut self.pair else { return Ok(()) };
        match pair.destroy() {
            Ok(()) => {
                self.pair = None;
                self.rail.let_go();
                Ok(())
            }
            Err(e) => {
                std::mem::forget(self);
                Err(e)
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.rail.give_back(pair);
        }
    }
}
