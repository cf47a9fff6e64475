//! The service inside a process, behind a lock and tokio's clock: what a server's connections ask, and what tasks of
//! the same process ask without a socket, on a virtual clock too.

use crate::protocol::{Answer, Request, Rules, Service, Status};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// A service of this process.
#[derive(Debug)]
pub struct Inside {
    service: Mutex<Service>,
    began: Instant,
    lease: Duration,
}

impl Inside {
    /// With nobody in it. Its clock begins now.
    pub fn new(rules: Rules) -> Self {
        Self { service: Mutex::new(Service::new(rules)), began: Instant::now(), lease: rules.lease }
    }

    fn service(&self) -> MutexGuard<'_, Service> {
        self.service.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers `request` now.
    pub fn handle(&self, request: Request) -> Answer {
        self.service().handle(self.began.elapsed(), request)
    }

    /// Answers `request` if `stands`, which is looked at under the lock: whoever waited for it may have waited too long.
    pub(crate) fn handle_if(&self, request: Request, stands: impl FnOnce() -> bool) -> Option<Answer> {
        let mut service = self.service();
        stands().then(|| service.handle(self.began.elapsed(), request))
    }

    /// Time passed; several times a lease.
    pub fn tick(&self) {
        self.service().tick(self.began.elapsed());
    }

    /// How long a member may be silent.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Who holds what, now.
    pub fn status(&self) -> Status {
        self.service().status()
    }
}
