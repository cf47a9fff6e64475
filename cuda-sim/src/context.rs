//! Primary contexts: one a device, counted, poisoned for good.

use crate::{
    abi::code,
    loud,
    work::Touch,
    world::{State, World},
};

const FIRST_NAME: u64 = 0x4C0D_E000;

/// The contexts, by ordinal.
#[derive(Debug, Default)]
pub(crate) struct Contexts(Vec<Primary>);

#[derive(Debug, Clone, Default)]
struct Primary {
    retained: usize,
    poison: Option<u32>,
    dead: bool,
}

/// The name of a device's context: the same each time (row `primary-same-handle`).
pub(crate) fn name(ordinal: usize) -> u64 {
    FIRST_NAME + 64 * ordinal as u64
}

/// The ordinal of a context's name.
pub(crate) fn ordinal(name: u64, count: usize) -> Option<usize> {
    (0..count).find(|ordinal| self::name(*ordinal) == name)
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        Self(vec![Primary::default(); devices])
    }

    fn at(&mut self, ordinal: usize) -> Result<&mut Primary, u32> {
        self.0.get_mut(ordinal).ok_or(code::INVALID_DEVICE)
    }

    /// Whether calls with this context work.
    pub(crate) fn usable(&mut self, ordinal: usize) -> Result<(), u32> {
        let primary = self.at(ordinal)?;
        if primary.retained == 0 {
            return Err(code::CONTEXT_IS_DESTROYED);
        }
        primary.poison.map_or(Ok(()), Err)
    }

    /// Row `poison-retain-again`: releasing does not heal.
    pub(crate) fn retain(&mut self, ordinal: usize) -> Result<(), u32> {
        let primary = self.at(ordinal)?;
        // Never run on hardware.
        if primary.dead {
            return Err(code::DEVICE_UNAVAILABLE);
        }
        if let Some(code) = primary.poison {
            return Err(code);
        }
        primary.retained += 1;
        Ok(())
    }

    /// Gives whether that was the last (rows `primary-release-unretained`, `primary-release-too-often`).
    fn release(&mut self, ordinal: usize) -> Result<bool, u32> {
        let primary = self.at(ordinal)?;
        primary.retained = primary.retained.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        Ok(primary.retained == 0)
    }

    /// Gives whether it was sound until now.
    pub(crate) fn poison(&mut self, ordinal: usize, code: u32) -> bool {
        self.at(ordinal).is_ok_and(|primary| primary.poison.replace(primary.poison.unwrap_or(code)).is_none())
    }

    /// What poisoned it.
    pub(crate) fn poisoned(&mut self, ordinal: usize) -> Option<u32> {
        self.at(ordinal).ok()?.poison
    }

    /// The device is gone. Never run on hardware.
    pub(crate) fn kill(&mut self, ordinal: usize) {
        if let Ok(primary) = self.at(ordinal) {
            primary.dead = true;
        }
    }

    pub(crate) fn is_dead(&self, ordinal: usize) -> bool {
        self.0.get(ordinal).is_some_and(|primary| primary.dead)
    }

    /// The contexts that are retained.
    pub(crate) fn active(&self) -> Vec<usize> {
        let retained = self.0.iter().enumerate().filter(|(_, primary)| primary.retained > 0);
        retained.map(|(ordinal, _)| ordinal).collect()
    }
}

impl State {
    /// `cuDevicePrimaryCtxRelease`: the last one takes what the context had with it; VMM memory stays (row
    /// `primary-released-then-retained`). Stricter than row `primary-release-under-pending-copy`.
    pub(crate) fn release_primary(&mut self, world: &World, ordinal: usize) -> Result<(), u32> {
        if !self.contexts.release(ordinal)? {
            return Ok(());
        }
        if let Some(what) = self.streams.pending(&Touch::Context(ordinal)) {
            loud::stop(&format!("cuDevicePrimaryCtxRelease while {what} is pending"));
        }
        self.streams.close_all(ordinal);
        self.pins.forget(ordinal);
        self.modules.forget(ordinal);
        world.changed.notify_all();
        Ok(())
    }
}
