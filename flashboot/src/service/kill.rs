//! For tests of what the others do: a clone that kills itself, or another process, at a chosen moment.

use crate::replicate::die;
use flashboot_driver::Step;
use rustix::process::{Pid, Signal, kill_process};
use std::str::FromStr;

/// When a clone kills, and whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KillAt {
    /// When.
    pub moment: Moment,
    /// A process that it may signal; `None`: itself.
    pub pid: Option<Pid>,
}

/// A moment in a clone's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It has a source, and has read nothing.
    Registered,
    /// It pulls this chunk.
    Pull(u64),
    /// It has verified this chunk, and published nothing of it.
    Chunk(u64),
    /// It has everything, and has told nobody.
    Complete,
}

impl KillAt {
    /// Kills, where this is the moment.
    pub(super) fn at(self, moment: Moment) {
        if self.moment != moment {
            return;
        }
        match self.pid {
            None => die(),
            // It may have gone by itself.
            Some(pid) => drop(kill_process(pid, Signal::KILL)),
        }
    }

    /// Kills, where `step` is the moment.
    pub(super) fn step(self, step: Step) {
        match step {
            Step::Pulling { chunk, .. } => self.at(Moment::Pull(chunk.index)),
            Step::Verified { chunk, .. } => self.at(Moment::Chunk(chunk.index)),
            _ => {}
        }
    }
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (moment, pid) = match text.split_once('@') {
            Some((moment, pid)) => {
                let pid = pid.parse::<u32>().ok().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
                (moment, Some(pid.ok_or_else(|| format!("`{text}` names no process"))?))
            }
            None => (text, None),
        };
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no chunk"));
        let moment = match moment.split_once(':') {
            Some(("pull", chunk)) => number(chunk).map(Moment::Pull),
            Some(("chunk", chunk)) => number(chunk).map(Moment::Chunk),
            _ if moment == "registered" => Ok(Moment::Registered),
            _ if moment == "complete" => Ok(Moment::Complete),
            _ => Err(format!("`{moment}` is not registered, pull:N, chunk:N or complete")),
        }?;
        Ok(Self { moment, pid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_and_processes_are_read() {
        let of = |text: &str| text.parse::<KillAt>();
        assert_eq!(of("pull:3"), Ok(KillAt { moment: Moment::Pull(3), pid: None }));
        assert_eq!(of("complete@7"), Ok(KillAt { moment: Moment::Complete, pid: Pid::from_raw(7) }));
        for bad in ["", "pull", "pull:x", "chunk:1@", "chunk:1@0", "chunk:1@-4", "never@3"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
