//! The thread's loop.

use super::{Command, ended, hop::Shared, lane::hop_of};
use crate::{
    engine::Hop,
    error::{failed, place},
    verbs::{Completion, Event},
};
use flashboot_core::{Code, Error, Kind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    collections::HashMap,
    os::fd::{AsFd as _, OwnedFd},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// How long an endpoint that closes waits for its queue pairs to be quiet.
const CLOSING: Duration = Duration::from_secs(5);

pub(super) struct Run {
    shared: Shared,
    hops: HashMap<u32, Hop>,
    commands: mpsc::Receiver<Command>,
    wake: Arc<OwnedFd>,
    spin: Duration,
    found: Vec<Completion>,
    stop_by: Option<Instant>,
}

impl Run {
    pub(super) fn new(
        shared: Shared,
        commands: mpsc::Receiver<Command>,
        wake: Arc<OwnedFd>,
        spin: Duration,
    ) -> Self {
        Self { shared, hops: HashMap::new(), commands, wake, spin, found: Vec::new(), stop_by: None }
    }

    pub(super) fn run(mut self) {
        let mut last_work = Instant::now();
        loop {
            let mut worked = self.take_commands();
            worked |= self.take_completions();
            self.turn();
            let now = Instant::now();
            if let Some(by) = self.stop_by
                && (self.hops.is_empty() || now >= by)
            {
                break;
            }
            if worked {
                last_work = now;
            } else if self.hops.values().any(Hop::can_post) {
                // A lane failed under what was to go by it: another takes it at once.
                std::thread::yield_now();
            } else if !self.busy() || now.saturating_duration_since(last_work) >= self.spin {
                self.sleep();
            } else {
                std::hint::spin_loop();
            }
        }
        if !self.hops.is_empty() {
            // A device that reports nothing may still write: what it was given stays as it is, for ever.
            tracing::error!(
                hops = self.hops.len(),
                "queue pairs did not become quiet; their memory stays owned"
            );
            std::mem::forget(self);
        }
    }

    fn busy(&self) -> bool {
        self.hops.values().any(Hop::is_busy)
    }

    fn take_commands(&mut self) -> bool {
        let mut worked = false;
        loop {
            let command = match self.commands.try_recv() {
                Ok(command) => command,
                Err(mpsc::TryRecvError::Empty) => return worked,
                Err(mpsc::TryRecvError::Disconnected) => Command::Stop,
            };
            worked = true;
            match command {
                Command::Attach(hop) => {
                    self.hops.insert(hop.id, *hop);
                }
                Command::Start(hop, job) => match self.hops.get_mut(&hop) {
                    Some(hop) => hop.start(job),
                    None => {
                        job.landing.fail(ended());
                        job.landing.account();
                    }
                },
                Command::Look(hop, look) => match self.hops.get_mut(&hop) {
                    Some(hop) => hop.look(look),
                    None => drop(look.tell.send(Err(ended()))),
                },
                Command::Cancel(hop, job) => {
                    if let Some(hop) = self.hops.get_mut(&hop) {
                        hop.cancel(job, Instant::now());
                    }
                }
                Command::Close(hop) => {
                    if let Some(hop) = self.hops.get_mut(&hop) {
                        hop.close();
                    }
                }
                Command::Stop => {
                    if self.stop_by.is_none() {
                        self.stop_by = Some(Instant::now() + CLOSING);
                        for hop in self.hops.values_mut() {
                            hop.close();
                            hop.abort(&ended());
                        }
                    }
                    return true;
                }
            }
        }
    }

    /// Takes every completion and event that there is.
    fn take_completions(&mut self) -> bool {
        let rails = self.shared.rails.clone();
        let mut worked = false;
        for (number, rail) in rails.iter().enumerate() {
            self.found.clear();
            if let Err(e) = rail.completions().poll(&mut self.found) {
                let error = failed(e, rail.name(), Some(rail.port()), "taking completions");
                self.lose_rail(number, &error);
            }
            self.shared.counters.completions.add(self.found.len() as u64);
            for done in std::mem::take(&mut self.found) {
                worked = true;
                if let Some(hop) = self.hops.get_mut(&hop_of(done.id)) {
                    hop.completed(done, &mut self.shared);
                }
            }
        }
        worked
    }

    fn take_events(&mut self) {
        let rails = self.shared.rails.clone();
        for (number, rail) in rails.iter().enumerate() {
            while let Ok(Some(event)) = rail.device().event() {
                tracing::debug!(device = rail.name(), ?event, "an event");
                let port = place(rail.name(), Some(rail.port()));
                match event {
                    Event::PortUp(p) if p == rail.port() => rail.set_down(false),
                    Event::PortDown(p) if p == rail.port() => {
                        rail.set_down(true);
                        let error =
                            Error::new(Kind::SourceLost, "ibv_get_async_event", format!("{port} went down"))
                                .with_remedy("look at the cable, the switch and `ip link`");
                        for hop in self.hops.values_mut() {
                            hop.rail_down(number, &error);
                        }
                    }
                    Event::DeviceFatal | Event::QueueLost => {
                        let what = if event == Event::QueueLost {
                            "its completion queue overran"
                        } else {
                            "it is beyond use"
                        };
                        let error = Error::new(Kind::Io, "ibv_get_async_event", format!("{port}: {what}"))
                            .with_code(Code::Errno(5));
                        rail.set_down(true);
                        self.lose_rail(number, &error);
                    }
                    _ => {}
                }
            }
        }
    }

    fn lose_rail(&mut self, rail: usize, error: &Error) {
        for hop in self.hops.values_mut() {
            if hop.lanes.iter().any(|lane| lane.rail == rail) {
                hop.lose(rail, error);
            }
        }
    }

    /// Moves every hop on.
    fn turn(&mut self) {
        let now = Instant::now();
        let shared = &mut self.shared;
        self.hops.retain(|_, hop| {
            hop.expire(now, shared);
            hop.pump(shared);
            hop.settle(shared)
        });
    }

    /// Sleeps until something happens: a command, a completion, an event, the end of a cancelled pull's time.
    fn sleep(&mut self) {
        let now = Instant::now();
        let next =
            self.hops.values().filter_map(|hop| hop.next_deadline(&self.shared)).chain(self.stop_by).min();
        let wait = next.map(|at| at.saturating_duration_since(now) + Duration::from_micros(1));
        let busy = self.busy();
        let rails = self.shared.rails.clone();
        if busy {
            for rail in &rails {
                if let Err(e) = rail.completions().arm() {
                    tracing::warn!(device = rail.name(), errno = e.errno, "cannot ask for completions");
                }
            }
            // What completed before they were armed makes no event.
            if self.take_completions() {
                self.turn();
                return;
            }
        }
        let mut polled = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        for rail in &rails {
            polled.push(PollFd::from_borrowed_fd(rail.completions().as_fd(), PollFlags::IN));
            polled.push(PollFd::from_borrowed_fd(rail.device().as_fd(), PollFlags::IN));
        }
        let timeout = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        let _ = poll(&mut polled, timeout.as_ref());
        let ready: Vec<bool> = polled.iter().map(|p| !p.revents().is_empty()).collect();
        drop(polled);
        if ready.first() == Some(&true) {
            let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        }
        let mut events = false;
        for (rail, ready) in rails.iter().zip(ready.get(1..).unwrap_or_default().chunks(2)) {
            if ready.first() == Some(&true)
                && let Err(e) = rail.completions().disarm()
            {
                tracing::warn!(device = rail.name(), errno = e.errno, "cannot take a completion event");
            }
            events |= ready.get(1) == Some(&true);
        }
        if events {
            self.take_events();
        }
    }
}
