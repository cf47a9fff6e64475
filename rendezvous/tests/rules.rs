//! What the service holds members to: the barrier, grants, back-off, leases, and what it refuses by name.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::{
    Answer, Cause, Hello, NEWEST, OLDEST, Plan, Reason, Registration, Request, Role, Rules, Service, Wanted,
    agree, decode,
};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn seed(word: u64, host: u64) -> Registration {
    sim::registration(word, Role::Seed, sim::content(0), host)
}

fn clone(word: u64, host: u64) -> Registration {
    sim::registration(word, Role::Clone, sim::content(0), host)
}

fn ask(service: &mut Service, now: Duration, request: Request) -> Answer {
    // As a server does: it ticks several times a lease.
    service.handle(now, request)
}

fn register(service: &mut Service, now: Duration, said: &Registration) -> Answer {
    ask(service, now, Request::Register(said.clone()))
}

fn plan(answer: Answer) -> Plan {
    match answer {
        Answer::Registered { plan: Some(plan), .. } => plan,
        other => panic!("no plan but {other:?}"),
    }
}

fn wait(answer: Answer) -> u64 {
    match answer {
        Answer::Wait { retry_ms, .. } => retry_ms,
        other => panic!("no wait but {other:?}"),
    }
}

fn refused(answer: Answer) -> Reason {
    match answer {
        Answer::Refused(refusal) => refusal.reason,
        other => panic!("not refused but {other:?}"),
    }
}

fn renew(said: &Registration, holds: u64, upstream: Option<u64>, epoch: u32) -> Request {
    let upstream = upstream.map(|word| clone(word, 0).member);
    Request::Renew { member: said.member, secret: said.secret, holds, upstream, epoch, membership: 0 }
}

#[test]
fn one_host_reads_across_once_and_the_rest_in_a_chain() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    let mut upstream = Vec::new();
    for (word, host) in [(2, 2), (3, 2), (4, 1), (5, 2), (6, 3)] {
        upstream.push(plan(register(&mut service, SECOND, &clone(word, host))).upstream.0.word());
    }
    // 4 is on the seed's host, whose memory carries nobody; 6 crosses from host 2, whose network carries nobody.
    assert_eq!(upstream, [1, 2, 1, 3, 2]);
}

#[test]
fn a_barrier_waits_for_all_and_orders_them_by_place() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    let expecting = |word, host| Registration { expect: Some(3), ..clone(word, host) };
    let (a, b, c) = (expecting(2, 2), expecting(3, 1), expecting(4, 2));
    for early in [&a, &b, &a] {
        assert!(wait(register(&mut service, SECOND, early)) > 0);
    }
    let other = Registration { expect: Some(4), ..clone(5, 1) };
    assert_eq!(refused(register(&mut service, SECOND, &other)), Reason::Mismatch);
    // The one that was refused is a member still: it leaves.
    let leave = Request::Leave { member: other.member, secret: other.secret };
    assert_eq!(ask(&mut service, SECOND, leave), Answer::Done);
    let sources: Vec<_> = [&c, &a, &b]
        .map(|said| plan(register(&mut service, SECOND, said)).upstream.0.word())
        .into_iter()
        .collect();
    // One across, the rest on their own hosts, whoever came first.
    assert_eq!(sources, [2, 1, 1]);
    let late = expecting(6, 9);
    plan(register(&mut service, SECOND, &late));
}

#[test]
fn a_service_that_comes_back_lets_begin_who_had_not_heard_that_all_had_come() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    let expecting = |word| Registration { expect: Some(3), ..clone(word, 1) };
    // The first of three heard of the service before this one that it may read.
    let begun = Registration { upstream: Some(seed(1, 1).member), epoch: 1, ..expecting(2) };
    for early in [3, 4] {
        assert!(wait(register(&mut service, SECOND, &expecting(early))) > 0);
    }
    plan(register(&mut service, SECOND, &begun));
    for early in [3, 4] {
        plan(register(&mut service, SECOND, &expecting(early)));
    }
}

#[test]
fn a_seed_serves_no_more_readers_than_it_grants() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &Registration { readers: 1, ..seed(1, 1) });
    // A clone that serves nobody.
    let first = Registration { readers: 0, ..clone(2, 1) };
    assert_eq!(plan(register(&mut service, SECOND, &first)).upstream, seed(1, 1).member);
    wait(register(&mut service, SECOND, &clone(3, 1)));
    let bytes = sim::content(0).bytes;
    ask(&mut service, SECOND, renew(&first, bytes, None, 1));
    assert_eq!(plan(register(&mut service, SECOND, &clone(3, 1))).upstream, seed(1, 1).member);
}

#[test]
fn a_late_clone_reads_from_one_that_has_finished_rather_than_from_a_longer_chain() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    for word in [2, 3] {
        plan(register(&mut service, SECOND, &clone(word, 1)));
    }
    ask(&mut service, SECOND, renew(&clone(2, 1), sim::CHUNKS, None, 1));
    // 1 serves nobody now, 2 still 3.
    assert_eq!(plan(register(&mut service, SECOND, &clone(4, 1))).upstream.0.word(), 1);
    assert_eq!(plan(register(&mut service, SECOND, &clone(5, 1))).upstream.0.word(), 3);
}

#[test]
fn a_source_that_gave_wrong_bytes_is_never_given_again_and_one_in_doubt_only_when_it_shows_life() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    let reader = clone(2, 1);
    let first = plan(register(&mut service, SECOND, &reader));
    let lost = |cause, epoch| Request::Lost {
        member: reader.member,
        secret: reader.secret,
        source: first.upstream,
        epoch,
        cause,
        corrupt: false,
        holds: 1,
    };
    wait(ask(&mut service, SECOND, lost(Cause::Lost, 1)));
    wait(ask(&mut service, 5 * SECOND, lost(Cause::Lost, 1)));
    ask(&mut service, 5 * SECOND, renew(&seed(1, 1), sim::CHUNKS, None, 0));
    let second = plan(ask(&mut service, 5 * SECOND, lost(Cause::Lost, 1)));
    assert_eq!((second.upstream, second.epoch), (first.upstream, 2));
    wait(ask(&mut service, 5 * SECOND, lost(Cause::Refused, 2)));
    for later in 6..30 {
        ask(&mut service, later * SECOND, renew(&seed(1, 1), sim::CHUNKS, None, 0));
        wait(ask(&mut service, later * SECOND, lost(Cause::Refused, 2)));
    }
}

#[test]
fn two_readers_that_found_wrong_bytes_withdraw_a_source_and_one_only_puts_it_last() {
    let mut service = Service::new(Rules::default());
    let bad = seed(1, 1);
    register(&mut service, SECOND, &bad);
    let corrupt = |reader: &Registration, epoch| Request::Lost {
        member: reader.member,
        secret: reader.secret,
        source: bad.member,
        epoch,
        cause: Cause::Refused,
        corrupt: true,
        holds: 1,
    };
    let blame =
        |service: &Service| service.status().members.iter().find(|m| m.member == bad.member).unwrap().blame;
    let refused = |answer| match answer {
        Answer::Wait { refused, .. } => refused,
        other => panic!("no wait but {other:?}"),
    };
    let (one, two) = (clone(2, 2), clone(3, 3));
    assert_eq!(plan(register(&mut service, SECOND, &one)).upstream, bad.member);
    assert!(refused(ask(&mut service, SECOND, corrupt(&one, 1))), "nobody is left for it");
    assert!(refused(ask(&mut service, SECOND, corrupt(&one, 1))), "twice is once");
    assert_eq!((blame(&service).readers, blame(&service).withdrawn), (1, false));
    // Another reader may have it, for want of a better.
    ask(&mut service, 2 * SECOND, renew(&bad, sim::CHUNKS, None, 0));
    assert_eq!(plan(register(&mut service, 3 * SECOND, &two)).upstream, bad.member);
    assert!(refused(ask(&mut service, 3 * SECOND, corrupt(&two, 1))));
    assert_eq!((blame(&service).readers, blame(&service).withdrawn), (2, true));
    // It is told, and given to nobody, however long ago that was; those who come are told why they wait.
    for later in 4..30 {
        let Answer::Renewed { blame, .. } =
            ask(&mut service, later * SECOND, renew(&bad, sim::CHUNKS, None, 0))
        else {
            panic!("not renewed")
        };
        assert!(blame.withdrawn);
        assert!(refused(register(&mut service, later * SECOND, &clone(4, 1))));
    }
    // A sound seed is given to all of them, and its plan does not name the other.
    let good = seed(5, 5);
    register(&mut service, 30 * SECOND, &good);
    for reader in [&one, &two, &clone(4, 1)] {
        let plan = plan(register(&mut service, 30 * SECOND, reader));
        assert_ne!(plan.upstream, bad.member);
        assert!(plan.holders.iter().all(|holder| holder.member != bad.member), "{plan:?}");
    }
}

#[test]
fn what_an_earlier_release_says_of_a_loss_is_no_report_of_wrong_bytes() {
    let said = r#"{"lost":{"member":"0000000000000002","secret":1,"source":"0000000000000001","epoch":1,
        "cause":"refused","holds":0}}"#;
    let Ok(Request::Lost { corrupt, cause, .. }) = decode(said.as_bytes()) else { panic!("not read") };
    assert_eq!((corrupt, cause), (false, Cause::Refused));
    let answer: Answer = decode(br#"{"wait":{"retry_ms":50,"why":"a place"}}"#).unwrap();
    assert_eq!(answer, Answer::Wait { retry_ms: 50, why: "a place".into(), refused: false });
    let answer: Answer = decode(br#"{"renewed":{"lease_ms":1,"plan":null}}"#).unwrap();
    assert!(matches!(answer, Answer::Renewed { blame, .. } if blame.is_none()));
}

#[test]
fn a_member_that_flaps_waits_longer_every_time() {
    let mut service = Service::new(Rules::default());
    let named = |word| Registration { name: Some("node-7".into()), ..seed(word, 1) };
    for word in 1..=4 {
        assert!(matches!(register(&mut service, SECOND, &named(word)), Answer::Registered { .. }), "{word}");
    }
    assert_eq!(wait(register(&mut service, SECOND, &named(5))), 1000);
    assert!(matches!(register(&mut service, 2 * SECOND, &named(5)), Answer::Registered { .. }));
    assert_eq!(wait(register(&mut service, 2 * SECOND, &named(6))), 2000);
}

#[test]
fn whoever_is_silent_for_a_lease_is_forgotten_and_asked_to_come_again() {
    let mut service = Service::new(Rules::default());
    register(&mut service, SECOND, &seed(1, 1));
    for later in 2..=11 {
        service.tick(later * SECOND);
    }
    assert_eq!(
        refused(ask(&mut service, 12 * SECOND, renew(&seed(1, 1), 0, None, 0))),
        Reason::UnknownMember
    );
    assert!(matches!(register(&mut service, 12 * SECOND, &seed(1, 1)), Answer::Registered { .. }));
}

#[test]
fn a_clone_that_registers_again_keeps_its_source_and_its_progress() {
    let mut service = Service::new(Rules::default());
    let again = Registration { holds: 5, upstream: Some(seed(1, 1).member), epoch: 3, ..clone(2, 1) };
    let kept = plan(register(&mut service, SECOND, &again));
    assert_eq!((kept.upstream, kept.epoch, kept.holders.len()), (seed(1, 1).member, 3, 0));
    register(&mut service, SECOND, &seed(1, 1));
    assert_eq!(plan(register(&mut service, SECOND, &again)).holders.len(), 1);
}

#[test]
fn what_is_asked_for_is_one_or_refused_by_name() {
    let mut service = Service::new(Rules::default());
    let wanted = |model: Option<&str>| Wanted {
        image: None,
        model: model.map(Into::into),
        revision: None,
        rank: None,
    };
    let find = |service: &mut Service, model| ask(service, SECOND, Request::Find(wanted(model)));
    assert_eq!(refused(find(&mut service, Some("model-0"))), Reason::NoSuchImage);
    assert_eq!(refused(find(&mut service, None)), Reason::Malformed);
    register(&mut service, SECOND, &seed(1, 1));
    assert_eq!(find(&mut service, Some("model-0")), Answer::Found(sim::content(0)));
    let mut second = seed(2, 1);
    second.content.rank = "target-0-1-0-0".into();
    register(&mut service, SECOND, &second);
    assert_eq!(refused(find(&mut service, Some("model-0"))), Reason::Ambiguous);
}

#[test]
fn impossible_registrations_are_malformed() {
    let mut service = Service::new(Rules::default());
    let mut said = |change: fn(&mut Registration)| {
        let mut said = seed(1, 1);
        change(&mut said);
        refused(register(&mut service, SECOND, &said))
    };
    assert_eq!(said(|s| s.holds = 0), Reason::Malformed);
    assert_eq!(said(|s| (s.role, s.holds) = (Role::Clone, s.content.bytes + 1)), Reason::Malformed);
    assert_eq!(said(|s| s.content.image = "x".into()), Reason::Malformed);
    assert_eq!(said(|s| s.content.model = "x\n".into()), Reason::Malformed);
    assert_eq!(said(|s| s.content.manifest_bytes = u64::MAX), Reason::Malformed);
    assert_eq!(said(|s| s.place.host = String::new()), Reason::Malformed);
    assert_eq!(said(|s| s.locators = vec!["flashboot1.x".into()]), Reason::Malformed);
    assert_eq!(said(|s| s.expect = Some(0)), Reason::Malformed);
    let full = Rules { members: 1, ..Rules::default() };
    let mut service = Service::new(full);
    register(&mut service, SECOND, &seed(1, 1));
    assert_eq!(refused(register(&mut service, SECOND, &seed(2, 1))), Reason::Full);
}

#[test]
fn two_releases_talk_or_refuse_by_name() {
    let hello = |oldest, newest| Hello { oldest, newest, release: "9.9.9".into() };
    assert_eq!(agree(&Hello::ours()), Ok(NEWEST));
    assert_eq!(agree(&hello(OLDEST, u16::MAX)), Ok(NEWEST));
    for (oldest, newest) in [(NEWEST + 1, NEWEST + 2), (0, OLDEST - 1), (NEWEST + 1, OLDEST)] {
        let refusal = agree(&hello(oldest, newest)).unwrap_err();
        assert_eq!(refusal.reason, Reason::Version);
        assert!(refusal.detail.contains("9.9.9"), "{refusal}");
    }
    // What a later release adds is passed over; what it asks anew is refused by name.
    let said = br#"{"leave":{"member":"0000000000000001","secret":1,"why":"tired"}}"#;
    assert!(matches!(decode::<Request>(said), Ok(Request::Leave { .. })));
    assert_eq!(decode::<Request>(br#"{"dance":{}}"#).unwrap_err().reason, Reason::Malformed);
    let reason: Reason = serde_json::from_str("\"a-later-one\"").unwrap();
    assert_eq!(reason, Reason::Other);
}

#[test]
fn a_reader_is_told_of_a_source_that_fell_silent_and_not_of_one_that_left() {
    let ended = |service: &mut Service, now, upstream, epoch| match ask(
        service,
        now,
        renew(&clone(9, 1), 1, Some(upstream), epoch),
    ) {
        Answer::Renewed { source_ended, .. } => source_ended,
        other => panic!("{other:?}"),
    };
    let rules = Rules::default();
    let mut service = Service::new(rules);
    register(&mut service, SECOND, &seed(1, 1));
    register(&mut service, SECOND, &clone(2, 1));
    register(&mut service, SECOND, &clone(9, 1));
    assert!(!ended(&mut service, SECOND, 2, 1), "it lives");
    assert!(!ended(&mut service, SECOND, 77, 2), "who was never there may be one that has yet to come back");
    // The second says nothing for a lease.
    let late = SECOND + rules.lease / 2;
    ask(&mut service, late, renew(&seed(1, 1), 1000, None, 0));
    assert!(!ended(&mut service, late, 2, 3));
    let dead = SECOND + rules.lease + rules.lease / 4;
    assert!(ended(&mut service, dead, 2, 3));
    register(&mut service, dead, &clone(2, 1));
    assert!(!ended(&mut service, dead, 2, 3), "it was only slow");
    let leaves = Request::Leave { member: seed(1, 1).member, secret: seed(1, 1).secret };
    ask(&mut service, dead, leaves);
    assert!(!ended(&mut service, dead, 1, 4), "it serves on until its readers have ended");
}
