//! What a long-running process lets others see of it: metrics, whether it lives, whether it is ready, what it holds.
//!
//! [`Observed`] is what the process knows of itself; whoever does the work tells it, and nothing waits for it. [`serve`]
//! shows it by HTTP where `http.listen` says so. *Ready* is said of a data plane that is verified: every member of the process holds all of its
//! content, every block of it compared, and serves it, and stands registered; a service and a node agent are ready once they listen, or stand by.
//!
//! One file each: the numbers ([`metrics`](self)), the endpoint ([`http`](self)).
//!
//! Must never: show a secret, a locator or a token; hold up who tells it something.

mod http;
mod metrics;

pub use http::{Http, Showing, serve};

use crate::{agent, service::Hop};
use flashboot_core::Error;
use flashboot_rendezvous::{
    Footing, Pulse,
    protocol::{Blame, Content, MemberId, Status},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The most label values of one metric: what comes after them is counted as `other`.
const MOST_LABELS: usize = 64;
/// The longest reason that is a label.
const LONGEST_LABEL: usize = 120;

/// Asks a service in this process who holds what; `None` while it does not serve.
type Ask = Box<dyn Fn() -> Option<Status> + Send + Sync>;

/// Asks the agent in this process what it keeps; `None` once it is ending.
type AskAgent = Arc<dyn Fn() -> Option<agent::Status> + Send + Sync>;

/// What a process shows of itself. Cloning shares it.
#[derive(Clone, Default)]
pub struct Observed(Arc<Mutex<Inner>>);

impl fmt::Debug for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed").field("ready", &self.ready()).finish()
    }
}

#[derive(Default)]
struct Inner {
    next: u64,
    members: BTreeMap<u64, Member>,
    totals: Totals,
    service: Option<Ask>,
    agent: Option<AskAgent>,
}

/// Counted since the process began.
#[derive(Debug, Clone, Default)]
struct Totals {
    bytes: BTreeMap<String, u64>,
    seconds: BTreeMap<&'static str, f64>,
    fallbacks: BTreeMap<(String, String), u64>,
    losses: BTreeMap<&'static str, u64>,
    chunks: u64,
    repaired: u64,
    read_bytes_per_s: f64,
}

#[derive(Debug)]
struct Member {
    role: &'static str,
    phase: Phase,
    trace: Option<String>,
    member: Option<MemberId>,
    content: Option<Content>,
    verified: u64,
    transport: String,
    pulse: Option<Pulse>,
}

impl Member {
    fn lacking(&self) -> Option<&'static str> {
        match self.phase {
            Phase::Starting => return Some("starting"),
            Phase::Filling => return Some("filling"),
            Phase::Draining => return Some("draining"),
            Phase::Ready => {}
        }
        match self.pulse.as_ref()?.footing()? {
            Footing::Registered => None,
            Footing::Forgotten => Some("the service is silent, or has forgotten it"),
            Footing::Stranger => Some("the service is another than it registered at"),
            Footing::Refused => Some("the service refuses it"),
            Footing::Withdrawn => Some("its readers found wrong bytes"),
        }
    }
}

/// How far a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// It has no content yet.
    Starting,
    /// It fills its arena, and verifies.
    Filling,
    /// It holds everything, verified, and serves it.
    Ready,
    /// It was asked to go, and its readers end.
    Draining,
}

/// One member as others see it.
#[derive(Debug, Clone, Serialize)]
struct MemberView {
    role: &'static str,
    phase: Phase,
    trace: Option<String>,
    member: Option<MemberId>,
    content: Option<Content>,
    /// Bytes, from the payload's start.
    verified: u64,
    /// Whom it reads from.
    upstream: Option<MemberId>,
    /// Milliseconds since the service last had it; `None` before it is registered.
    lease_age_ms: Option<u64>,
    /// Where it stands with the service; `None` before it is registered.
    standing: Option<Footing>,
    /// Whether the service answered last time.
    service_reached: bool,
    /// Why it did not, and what to do about it.
    service_error: Option<String>,
    /// What readers say of its bytes, as far as the service told.
    blame: Blame,
    /// Why the service will not have it any more.
    evicted: Option<String>,
}

/// Everything, at one moment.
#[derive(Debug, Clone, Serialize)]
struct View {
    release: &'static str,
    ready: bool,
    members: Vec<MemberView>,
    /// Of the service in this process, where there is one that serves.
    service: Option<Status>,
    /// Of the node agent in this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<agent::Status>,
    #[serde(skip)]
    totals: Totals,
}

impl Observed {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another member of this process, until the handle is dropped.
    pub(crate) fn begin(&self, role: &'static str) -> Watched {
        let mut inner = self.lock();
        let key = inner.next;
        inner.next += 1;
        let member = Member {
            role,
            phase: Phase::Starting,
            trace: None,
            member: None,
            content: None,
            verified: 0,
            transport: "other".into(),
            pulse: None,
        };
        inner.members.insert(key, member);
        Watched { observed: self.clone(), key }
    }

    /// A service is in this process, and `ask` tells what it knows.
    pub(crate) fn service(&self, ask: impl Fn() -> Option<Status> + Send + Sync + 'static) {
        self.lock().service = Some(Box::new(ask));
    }

    /// A node agent is in this process, and `ask` tells what it keeps.
    pub(crate) fn agent(&self, ask: impl Fn() -> Option<agent::Status> + Send + Sync + 'static) {
        self.lock().agent = Some(Arc::new(ask));
    }

    /// Whether everything of this process is verified, registered, and serves.
    pub fn ready(&self) -> bool {
        self.lacking().is_none()
    }

    /// In a word, what is not as it has to be for this process to be ready.
    fn lacking(&self) -> Option<&'static str> {
        let inner = self.lock();
        if inner.service.is_none() && inner.agent.is_none() && inner.members.is_empty() {
            return Some("starting");
        }
        inner.members.values().find_map(Member::lacking)
    }

    fn view(&self) -> View {
        let ready = self.ready();
        let inner = self.lock();
        let members = inner.members.values().map(|m| {
            let pulse = m.pulse.as_ref();
            let age = pulse.and_then(Pulse::silence);
            MemberView {
                role: m.role,
                phase: m.phase,
                trace: m.trace.clone(),
                member: m.member,
                content: m.content.clone(),
                verified: m.verified,
                upstream: pulse.and_then(Pulse::upstream),
                standing: pulse.and_then(Pulse::footing),
                service_error: pulse.and_then(Pulse::trouble).map(|error| error.to_string()),
                blame: pulse.map(Pulse::blame).unwrap_or_default(),
                lease_age_ms: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
                service_reached: pulse.is_some_and(Pulse::is_reached),
                evicted: pulse.and_then(Pulse::evicted).map(|error| error.to_string()),
            }
        });
        View {
            release: env!("CARGO_PKG_VERSION"),
            ready,
            members: members.collect(),
            service: inner.service.as_ref().and_then(|ask| ask()),
            agent: inner.agent.as_ref().and_then(|ask| ask()),
            totals: inner.totals.clone(),
        }
    }
}

/// One member, as it tells of itself. Dropped, it is gone; what it counted stays.
pub(crate) struct Watched {
    observed: Observed,
    key: u64,
}

impl Watched {
    fn with(&self, change: impl FnOnce(&mut Member, &mut Totals)) {
        let mut inner = self.observed.lock();
        let Inner { members, totals, .. } = &mut *inner;
        if let Some(member) = members.get_mut(&self.key) {
            change(member, totals);
        }
    }

    /// It fills its arena with `content`.
    pub(crate) fn filling(&self, member: MemberId, content: &Content, trace: &str) {
        self.with(|m, _| {
            m.phase = Phase::Filling;
            m.member = Some(member);
            m.content = Some(content.clone());
            m.trace = Some(trace.to_owned());
        });
    }

    /// It is registered.
    pub(crate) fn registered(&self, pulse: Pulse) {
        self.with(|m, _| m.pulse = Some(pulse));
    }

    /// It holds everything, verified.
    pub(crate) fn ready(&self) {
        self.with(|m, _| m.phase = Phase::Ready);
    }

    /// It was asked to go.
    pub(crate) fn draining(&self) {
        self.with(|m, _| m.phase = Phase::Draining);
    }

    /// The first `bytes` are verified; the new ones came by what it reads by now, or from `disk`.
    pub(crate) fn verified(&self, bytes: u64, disk: bool) {
        self.with(|m, totals| {
            let new = bytes.saturating_sub(m.verified);
            m.verified = m.verified.max(bytes);
            let from = if disk { "disk" } else { &m.transport };
            *totals.bytes.entry(from.to_owned()).or_default() += new;
        });
    }

    /// So much is in its memory, verified, and did not come from anywhere just now.
    pub(crate) fn holds(&self, bytes: u64) {
        self.with(|m, _| m.verified = m.verified.max(bytes));
    }

    /// It reads by this hop.
    pub(crate) fn hops(&self, hop: &Hop) {
        let passed = hop.passed.iter().map(|passed| (passed.name.to_string(), passed.reason.as_str()));
        self.hop(hop.transport.as_str(), passed);
    }

    /// It reads by `transport`, after `passed` were passed over.
    fn hop<'p>(&self, transport: &str, passed: impl Iterator<Item = (String, &'p str)>) {
        self.with(|m, totals| {
            transport.clone_into(&mut m.transport);
            for (name, reason) in passed {
                let reason = reason.chars().filter(|c| !c.is_control()).take(LONGEST_LABEL).collect();
                let mut key = (name, reason);
                if totals.fallbacks.len() >= MOST_LABELS && !totals.fallbacks.contains_key(&key) {
                    key = ("other".into(), "other".into());
                }
                *totals.fallbacks.entry(key).or_default() += 1;
            }
        });
    }

    /// A source was lost.
    pub(crate) fn lost(&self, error: &Error) {
        let cause = if error.kind().is_refusal() { "refused" } else { "lost" };
        self.with(|_, totals| *totals.losses.entry(cause).or_default() += 1);
    }

    /// `phase` took so long.
    pub(crate) fn took(&self, phase: &'static str, time: Duration) {
        self.with(|_, totals| *totals.seconds.entry(phase).or_default() += time.as_secs_f64());
    }

    /// So many chunks were read, so many blocks again, at `bytes_per_s`.
    pub(crate) fn read(&self, chunks: u64, repaired: u64, bytes_per_s: f64) {
        self.with(|_, totals| {
            totals.chunks += chunks;
            totals.repaired += repaired;
            totals.read_bytes_per_s = bytes_per_s;
        });
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.observed.lock().members.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{Generation, Kind};

    pub(super) fn content() -> Content {
        Content {
            image: "ab".repeat(32),
            rank: "target-0-0-0-0".into(),
            model: "m".into(),
            revision: String::new(),
            fingerprint: String::new(),
            bytes: 100,
            manifest: "cd".repeat(32),
            manifest_bytes: 1,
        }
    }

    #[test]
    fn ready_is_said_of_what_is_verified_and_of_all_members_only() {
        let observed = Observed::default();
        assert!(!observed.ready(), "of nothing");
        let (one, two) = (observed.begin("seed"), observed.begin("clone"));
        let member = MemberId(Generation::from_random(1));
        one.filling(member, &content(), "t");
        one.ready();
        assert!(!observed.ready(), "the other has nothing");
        two.filling(member, &content(), "t");
        two.verified(99, false);
        assert!(!observed.ready());
        two.ready();
        assert!(observed.ready());
        one.draining();
        assert!(!observed.ready(), "nobody is to be sent here any more");
        drop(one);
        assert!(observed.ready());
        drop(two);
        assert!(!observed.ready());
        observed.service(|| None);
        assert!(observed.ready(), "a service that stands by");
    }

    #[test]
    fn bytes_are_counted_once_and_by_where_they_came_from() {
        let observed = Observed::default();
        let member = observed.begin("clone");
        member.hop("tcp", [("ipc".to_owned(), "another host")].into_iter());
        member.verified(40, false);
        member.hop("ipc", std::iter::empty());
        member.verified(70, false);
        member.verified(70, false);
        member.lost(&Error::new(Kind::Corrupt, "x", "y"));
        drop(member);
        let totals = observed.view().totals;
        assert_eq!((totals.bytes["tcp"], totals.bytes["ipc"]), (40, 30), "also after it is gone");
        assert_eq!(totals.losses["refused"], 1);
        assert_eq!(totals.fallbacks[&("ipc".into(), "another host".into())], 1);
    }

    #[test]
    fn reasons_cannot_make_labels_without_end() {
        let observed = Observed::default();
        let member = observed.begin("clone");
        for i in 0..1000 {
            let reason = format!("{i}\n{}", "x".repeat(1000));
            member.hop("tcp", [("ipc".to_owned(), reason.as_str())].into_iter());
        }
        let fallbacks = observed.view().totals.fallbacks;
        assert!(fallbacks.len() <= MOST_LABELS + 1);
        assert_eq!(fallbacks.values().sum::<u64>(), 1000);
        assert!(fallbacks.keys().all(|(_, reason)| reason.len() <= LONGEST_LABEL && !reason.contains('\n')));
    }
}
