//! The numbers, as Prometheus reads them. Counters count since the process began; seconds and bytes are the units.

use super::View;
use crate::agent::{State, Status as Kept};
use flashboot_rendezvous::{
    Footing,
    protocol::{Role, Status},
};
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use std::{fmt, sync::atomic::AtomicU64};

/// What the answer's type is called.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Float = Gauge<f64, AtomicU64>;
type Labels = Vec<(&'static str, String)>;

/// All of `view` as text.
pub(super) fn text(view: &View) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("flashboot");
    process(&mut registry, view);
    members(&mut registry, view);
    if let Some(status) = &view.service {
        service(&mut registry, status);
    }
    if let Some(status) = &view.agent {
        agent(&mut registry, status);
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn gauge(registry: &mut Registry, name: &str, help: &str, unit: Option<Unit>, value: f64) {
    let gauge = Float::default();
    gauge.set(value);
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, gauge),
        None => registry.register(name, help, gauge),
    }
}

fn counted(registry: &mut Registry, name: &str, help: &str, values: impl Iterator<Item = (Labels, u64)>) {
    let family = Family::<Labels, Counter>::default();
    for (labels, value) in values {
        family.get_or_create(&labels).inc_by(value);
    }
    registry.register(name, help, family);
}

fn gauges(registry: &mut Registry, name: &str, help: &str, values: impl Iterator<Item = (Labels, f64)>) {
    let family = Family::<Labels, Float>::default();
    for (labels, value) in values {
        family.get_or_create(&labels).set(value);
    }
    registry.register(name, help, family);
}

fn process(registry: &mut Registry, view: &View) {
    let totals = &view.totals;
    let release = vec![("release", view.release.to_owned())];
    gauges(registry, "build", "The release that runs", [(release, 1.0)].into_iter());
    gauge(
        registry,
        "ready",
        "1: everything here is verified, and serves",
        None,
        f64::from(u8::from(view.ready)),
    );
    counted(
        registry,
        "bytes",
        "Payload bytes that were verified, by where they came from: disk or a transport",
        totals.bytes.iter().map(|(from, bytes)| (vec![("from", from.clone())], *bytes)),
    );
    let seconds = Family::<Labels, Counter<f64, AtomicU64>>::default();
    for (phase, value) in &totals.seconds {
        seconds.get_or_create(&vec![("phase", (*phase).to_owned())]).inc_by(*value);
    }
    registry.register("phase_seconds", "Seconds by what was done", seconds);
    gauge(
        registry,
        "read_bytes_per_second",
        "How fast the last clone here was complete: bytes by the time from its plan to the last block verified",
        None,
        totals.read_bytes_per_s,
    );
    counted(
        registry,
        "fallbacks",
        "Transports that were passed over, by why",
        totals.fallbacks.iter().map(|((transport, reason), count)| {
            (vec![("transport", transport.clone()), ("reason", reason.clone())], *count)
        }),
    );
    counted(
        registry,
        "lost_sources",
        "Sources given up: lost, or refused for what they gave",
        totals.losses.iter().map(|(cause, count)| (vec![("cause", (*cause).to_owned())], *count)),
    );
    counted(registry, "chunks", "Chunks read", [(vec![], totals.chunks)].into_iter());
    counted(
        registry,
        "repairs",
        "Blocks read again after a wrong digest",
        [(vec![], totals.repaired)].into_iter(),
    );
}

fn members(registry: &mut Registry, view: &View) {
    let known = || view.members.iter().filter_map(|m| Some((m, m.member?, m.content.as_ref()?)));
    let labels =
        |member: &dyn fmt::Display, role: &str| vec![("member", member.to_string()), ("role", role.into())];
    gauges(
        registry,
        "payload_bytes",
        "Bytes of what a member holds or is to hold",
        known().map(|(m, id, content)| (labels(&id, m.role), content.bytes as f64)),
    );
    gauges(
        registry,
        "verified_bytes",
        "Bytes of it that are verified",
        known().map(|(m, id, _)| (labels(&id, m.role), m.verified as f64)),
    );
    gauges(
        registry,
        "lease_age_seconds",
        "Since the service last answered a member",
        known().filter_map(|(m, id, _)| Some((labels(&id, m.role), m.lease_age_ms? as f64 / 1e3))),
    );
    gauges(
        registry,
        "registered",
        "1: the service has a member, as far as it can know",
        known().filter_map(|(m, id, _)| Some((labels(&id, m.role), registered(m)?))),
    );
    gauges(
        registry,
        "service_reached",
        "1: the service answered a member last time",
        known().map(|(m, id, _)| (labels(&id, m.role), f64::from(u8::from(m.service_reached)))),
    );
}

/// Whether it is registered, as far as it can know.
fn registered(member: &super::MemberView) -> Option<f64> {
    member.standing.map(|standing| f64::from(u8::from(standing == Footing::Registered)))
}

/// Of the service in this process: sums, so that ten thousand members are as few lines.
fn service(registry: &mut Registry, status: &Status) {
    let complete = |m: &flashboot_rendezvous::protocol::MemberStatus| {
        status.contents.get(m.content).is_some_and(|content| content.bytes == m.holds)
    };
    let clones = || status.members.iter().filter(|m| m.role == Role::Clone);
    let count = |members: usize, state: &str| (vec![("state", state.to_owned())], members as f64);
    let reading = clones().filter(|m| m.upstream.is_some()).count();
    let done = clones().filter(|m| m.upstream.is_none() && complete(m)).count();
    let waiting = clones().count() - reading - done;
    let states = [count(reading, "reading"), count(done, "complete"), count(waiting, "waiting")];
    gauges(registry, "clones", "Clones that are registered, by what they do", states.into_iter());
    let seeds = status.members.iter().filter(|m| m.role == Role::Seed).count();
    gauge(registry, "seeds", "Seeds that are registered", None, seeds as f64);
    gauge(
        registry,
        "contents",
        "Rank images that somebody holds or held",
        None,
        status.contents.len() as f64,
    );
    let rate: u64 =
        clones().filter(|m| m.upstream.is_some()).fold(0, |sum, m| sum.saturating_add(m.bytes_per_s));
    let help = "Bytes a second that all clones read together, by their last reports";
    gauge(registry, "clones_bytes_per_second", help, None, rate as f64);
    let oldest = status.members.iter().map(|m| status.lease_ms.saturating_sub(m.lease_left_ms)).max();
    let help = "Since the member that has been silent longest was heard";
    gauge(registry, "oldest_lease_age", help, Some(Unit::Seconds), oldest.unwrap_or(0) as f64 / 1e3);
    let doubted = status.members.iter().filter(|m| m.doubts > 0).count();
    let accused = status.members.iter().filter(|m| !m.blame.is_none()).count();
    let help = "Members of which readers found wrong bytes";
    gauge(registry, "accused_members", help, None, accused as f64);
    gauge(registry, "doubted_members", "Members that were reported lost of late", None, doubted as f64);
}

/// Of the node agent in this process: sums, so that a hundred images are as few lines.
fn agent(registry: &mut Registry, kept: &Kept) {
    let state = |state: &str, held: bool| {
        let held = if held { "held" } else { "staged" };
        vec![("state", state.to_owned()), ("as", held.to_owned())]
    };
    let states = [("waiting", State::Waiting), ("filling", State::Filling), ("ready", State::Ready)];
    let of = || states.iter().flat_map(|(name, wanted)| [(*name, *wanted, true), (*name, *wanted, false)]);
    let entries = |wanted: State, held: bool| {
        let entries = kept.entries.iter().map(|listed| &listed.entry);
        entries.filter(move |entry| entry.state == wanted && entry.held == held)
    };
    gauges(
        registry,
        "agent_arenas",
        "Arenas that the agent keeps",
        of().map(|(name, wanted, held)| (state(name, held), entries(wanted, held).count() as f64)),
    );
    gauges(
        registry,
        "agent_arena_bytes",
        "Bytes of them, in host and GPU memory",
        of().map(|(name, wanted, held)| {
            (state(name, held), entries(wanted, held).map(|entry| entry.bytes as f64).sum())
        }),
    );
    let attached: u64 = kept.entries.iter().map(|listed| listed.entry.attached).sum();
    gauge(registry, "agent_attached", "Processes that have something attached", None, attached as f64);
    for (name, help, value) in [
        ("agent_limit_bytes", "The most bytes of host memory that the agent keeps", kept.limit),
        ("agent_used_bytes", "Bytes of host memory that it keeps", kept.used),
        ("agent_pinned_bytes", "Bytes of host memory that are pinned for pushes", kept.pinned),
    ] {
        gauge(registry, name, help, None, value as f64);
    }
    let counts = kept.counts;
    counted(
        registry,
        "agent_events",
        "What happened to arenas of the agent",
        [
            ("staged", counts.staged),
            ("held", counts.held),
            ("attached", counts.attached),
            ("evicted", counts.evicted),
            ("failed", counts.failed),
            ("refused", counts.refused),
        ]
        .into_iter()
        .map(|(event, count)| (vec![("event", event.to_owned())], count)),
    );
}
