use super::*;
use proptest::prelude::*;

const LIMIT: u64 = 100;

fn key(name: u8, place: Place) -> Key {
    Key { image: format!("image-{name}"), rank: "target-0-0-0-0".into(), place }
}

fn ask(name: u8, bytes: u64, priority: i32, hold: Option<Holding>) -> Ask {
    Ask { key: key(name, Place::Host), bytes, priority, hold, free: u64::MAX }
}

fn ledger() -> Ledger {
    Ledger::new(BTreeMap::from([(Place::Host, LIMIT)]))
}

/// Asks, and has it filled at once.
fn have(ledger: &mut Ledger, ask: &Ask, now: Instant) -> Id {
    let (Made::New(id, _) | Made::Present(id)) = ledger.ask(ask, now).unwrap();
    ledger.filling(id);
    assert!(ledger.ready(id, now));
    id
}

const HELD: Option<Holding> = Some(Holding { lease: None });

#[test]
fn the_least_priority_goes_first_then_what_was_not_used_for_longest_and_what_is_held_last() {
    let (mut ledger, start) = (ledger(), Instant::now());
    let at = |s| start + Duration::from_secs(s);
    let old = have(&mut ledger, &ask(0, 25, 1, None), at(0));
    let held = have(&mut ledger, &ask(1, 25, 0, HELD), at(1));
    let low = have(&mut ledger, &ask(2, 25, 0, None), at(2));
    let new = have(&mut ledger, &ask(3, 25, 1, None), at(3));
    assert_eq!(ledger.ask(&ask(4, 20, 1, None), at(4)), Ok(Made::New(4, vec![low])));
    assert_eq!(
        ledger.ask(&ask(5, 20, 1, None), at(5)),
        Ok(Made::New(5, vec![held])),
        "it yields to a higher one"
    );
    ledger.attach(old, 9, at(6)).unwrap();
    assert_eq!(
        ledger.ask(&ask(6, 20, 1, None), at(7)),
        Ok(Made::New(6, vec![new])),
        "the older one is attached"
    );
    let e = ledger.ask(&ask(7, 20, 1, None), at(8)).unwrap_err();
    assert_eq!(e.kind(), Kind::Exhausted);
    for said in ["100 bytes", "85 are taken", "25 of them attached", "the agent's limit"] {
        assert!(e.detail().contains(said), "{e}");
    }
    ledger.gone(9, at(9));
    assert_eq!(ledger.ask(&ask(7, 20, 1, None), at(10)), Ok(Made::New(7, vec![old])));
    assert_eq!(ledger.counts().evicted, 4);
}

#[test]
fn what_is_held_yields_to_a_higher_priority_only() {
    let (mut ledger, now) = (ledger(), Instant::now());
    let id = have(&mut ledger, &ask(0, 100, 5, HELD), now);
    assert_eq!(ledger.ask(&ask(1, 1, 5, None), now).unwrap_err().kind(), Kind::Exhausted);
    assert_eq!(ledger.yield_room(&Place::Host, 50, 5, 49).unwrap_err().kind(), Kind::Exhausted);
    assert_eq!(ledger.yield_room(&Place::Host, 50, 5, 50), Ok(Vec::new()), "it fits beside it");
    assert_eq!(ledger.yield_room(&Place::Host, 50, 6, 49), Ok(vec![id]));
    assert_eq!(ledger.used(&Place::Host), 0);
}

#[test]
fn a_large_victim_spares_the_small_ones_before_it() {
    let (mut ledger, now) = (ledger(), Instant::now());
    let small = have(&mut ledger, &ask(0, 10, 0, None), now);
    let large = have(&mut ledger, &ask(1, 80, 0, None), now);
    assert_eq!(ledger.ask(&ask(2, 80, 0, None), now), Ok(Made::New(2, vec![large])));
    assert!(ledger.state(small).is_some());
}

#[test]
fn more_than_the_limit_or_the_memory_is_refused_and_the_limit_is_named() {
    let (mut ledger, now) = (ledger(), Instant::now());
    let e = ledger.ask(&ask(0, 101, 9, None), now).unwrap_err();
    assert!(e.detail().contains("the agent's limit") && e.remedy().is_some(), "{e}");
    let short = Ask { free: 10, ..ask(0, 11, 9, None) };
    let e = ledger.ask(&short, now).unwrap_err();
    assert!(e.detail().contains("what the memory has is 10B"), "{e}");
    // What was admitted and not made yet is not free any more.
    ledger.ask(&Ask { free: 20, ..ask(1, 15, 0, None) }, now).unwrap();
    assert!(ledger.ask(&Ask { free: 20, ..ask(2, 15, 0, None) }, now).is_err());
    let gpu = Ask { key: key(3, Place::Gpu("g".into())), free: 1000, ..ask(3, 900, 0, HELD) };
    assert!(ledger.ask(&gpu, now).is_ok(), "another place, with no limit but its memory");
    assert_eq!(ledger.counts().refused, 3);
}

#[test]
fn a_lease_counts_while_nobody_has_it_and_ends_only_what_is_held() {
    let (mut ledger, start) = (ledger(), Instant::now());
    let at = |s| start + Duration::from_secs(s);
    let lease = Some(Holding { lease: Some(Duration::from_secs(10)) });
    let id = have(&mut ledger, &ask(0, 10, 0, lease), at(0));
    have(&mut ledger, &ask(1, 10, 0, None), at(0));
    assert!(ledger.expire(at(9)).is_empty());
    ledger.attach(id, 1, at(9)).unwrap();
    ledger.attach(id, 1, at(9)).unwrap();
    assert!(ledger.expire(at(1000)).is_empty());
    ledger.detach(id, 1, at(1000));
    assert!(ledger.expire(at(2000)).is_empty(), "attached once more");
    ledger.detach(id, 1, at(2000));
    assert_eq!(ledger.entry(id, at(2004)).unwrap().lease_left_ms, Some(6000));
    assert!(ledger.expire(at(2009)).is_empty());
    assert_eq!(ledger.expire(at(2010)), vec![id]);
    assert!(ledger.expire(at(9999)).is_empty(), "what is staged has no lease");
}

#[test]
fn what_is_attached_or_not_there_is_not_evicted_and_what_is_not_ready_not_attached() {
    let (mut ledger, now) = (ledger(), Instant::now());
    let Made::New(id, _) = ledger.ask(&ask(0, 10, 0, None), now).unwrap() else { panic!("it is new") };
    assert_eq!(ledger.attach(id, 1, now).unwrap_err().kind(), Kind::Unavailable);
    ledger.filling(id);
    assert_eq!(ledger.attach(id, 1, now).unwrap_err().kind(), Kind::Unavailable);
    assert_eq!(ledger.ask(&ask(0, 10, 3, HELD), now), Ok(Made::Present(id)));
    assert!(ledger.ready(id, now));
    ledger.attach(id, 1, now).unwrap();
    assert_eq!(ledger.evict(id).unwrap_err().kind(), Kind::Busy);
    ledger.gone(1, now);
    ledger.evict(id).unwrap();
    assert_eq!(ledger.evict(id).unwrap_err().kind(), Kind::Unavailable);
    assert!(!ledger.ready(id, now), "it was evicted while it was filled");
    assert_eq!(ledger.attach(id, 1, now).unwrap_err().kind(), Kind::Unavailable);
}

#[test]
fn the_highest_priority_is_filled_first_and_of_those_the_first_that_came() {
    let (mut ledger, now) = (ledger(), Instant::now());
    for (name, priority) in [(0, 0), (1, 2), (2, 2), (3, 1)] {
        ledger.ask(&ask(name, 10, priority, None), now).unwrap();
    }
    let mut order = Vec::new();
    while let Some(id) = ledger.next() {
        order.push(id);
        ledger.filling(id);
    }
    assert_eq!(order, [1, 2, 3, 0]);
}

#[derive(Debug, Clone)]
enum Op {
    Ask { name: u8, bytes: u64, priority: i32, held: bool, lease: Option<u64>, free: u64 },
    Fill(u8),
    Ready(u8),
    Fail(u8),
    Attach(u8, ClientId),
    Detach(u8, ClientId),
    Gone(ClientId),
    Evict(u8),
    Yield(u64, i32, u64),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let name = || 0u8..6;
    let client = || 0u64..3;
    prop_oneof![
        4 => (name(), 1u64..60, -2i32..3, any::<bool>(), prop::option::of(1u64..20), 0u64..200).prop_map(
            |(name, bytes, priority, held, lease, free)| Op::Ask { name, bytes, priority, held, lease, free }),
        3 => name().prop_map(Op::Fill),
        4 => name().prop_map(Op::Ready),
        1 => name().prop_map(Op::Fail),
        3 => (name(), client()).prop_map(|(n, c)| Op::Attach(n, c)),
        2 => (name(), client()).prop_map(|(n, c)| Op::Detach(n, c)),
        1 => client().prop_map(Op::Gone),
        1 => name().prop_map(Op::Evict),
        1 => (1u64..60, -2i32..3, 0u64..60).prop_map(|(bytes, priority, free)| Op::Yield(bytes, priority, free)),
        1 => (1u64..10).prop_map(Op::Wait),
    ]
}

/// Whether `gone` may go for an ask of `priority`.
fn check_victims(
    before: &[(Id, Entry)],
    gone: &[Id],
    priority: i32,
) -> std::result::Result<(), TestCaseError> {
    for id in gone {
        let (_, entry) = before.iter().find(|(other, _)| other == id).unwrap();
        prop_assert!(entry.attached == 0 && entry.state == State::Ready, "{entry:?}");
        prop_assert!(entry.priority <= priority && !(entry.held && entry.priority == priority), "{entry:?}");
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_limit_holds_what_is_attached_stays_and_a_refusal_changes_nothing(ops in prop::collection::vec(op(), 1..80)) {
        let mut ledger = ledger();
        let start = Instant::now();
        let mut clock = 0;
        for op in ops {
            let now = start + Duration::from_secs(clock);
            let before = ledger.entries(now);
            let find = |ledger: &Ledger, name| ledger.find(&key(name, Place::Host));
            match op.clone() {
                Op::Ask { name, bytes, priority, held, lease, free } => {
                    let hold = held.then(|| Holding { lease: lease.map(Duration::from_secs) });
                    let asked = Ask { free, ..ask(name, bytes, priority, hold) };
                    match ledger.ask(&asked, now) {
                        Ok(Made::New(id, gone)) => {
                            check_victims(&before, &gone, priority)?;
                            prop_assert_eq!(ledger.state(id), Some((State::Waiting, held)));
                            // None of them went in vain.
                            let freed = |id: &Id| before.iter().find(|(other, _)| other == id).unwrap().1.bytes;
                            let made: u64 = before.iter().filter(|(_, e)| e.state != State::Waiting).map(|(_, e)| e.bytes).sum();
                            let limit = LIMIT.min(made + free);
                            for id in &gone {
                                prop_assert!(ledger.used(&Place::Host) + freed(id) > limit);
                            }
                        }
                        Ok(Made::Present(id)) => prop_assert!(before.iter().any(|(other, _)| *other == id)),
                        Err(e) => {
                            prop_assert_eq!(e.kind(), Kind::Exhausted);
                            prop_assert_eq!(ledger.entries(now), before.clone());
                        }
                    }
                }
                Op::Fill(name) => {
                    if let Some(id) = find(&ledger, name).filter(|id| ledger.state(*id).unwrap().0 == State::Waiting) {
                        ledger.filling(id);
                    }
                }
                Op::Ready(name) => {
                    if let Some(id) = find(&ledger, name).filter(|id| ledger.state(*id).unwrap().0 == State::Filling) {
                        prop_assert!(ledger.ready(id, now));
                    }
                }
                Op::Fail(name) => {
                    if let Some(id) = find(&ledger, name).filter(|id| ledger.state(*id).unwrap().0 != State::Ready) {
                        ledger.failed(id);
                    }
                }
                Op::Attach(name, client) => {
                    if let Some(id) = find(&ledger, name) {
                        let ready = ledger.state(id).unwrap().0 == State::Ready;
                        prop_assert_eq!(ledger.attach(id, client, now).is_ok(), ready);
                    }
                }
                Op::Detach(name, client) => {
                    if let Some(id) = find(&ledger, name) {
                        ledger.detach(id, client, now);
                    }
                }
                Op::Gone(client) => ledger.gone(client, now),
                Op::Evict(name) => {
                    if let Some(id) = find(&ledger, name) {
                        let attached = before.iter().find(|(other, _)| *other == id).unwrap().1.attached;
                        prop_assert_eq!(ledger.evict(id).is_ok(), attached == 0);
                    }
                }
                Op::Yield(bytes, priority, free) => match ledger.yield_room(&Place::Host, bytes, priority, free) {
                    Ok(gone) => {
                        check_victims(&before, &gone, priority)?;
                        let freed: u64 = gone.iter().map(|id| before.iter().find(|(other, _)| other == id).unwrap().1.bytes).sum();
                        prop_assert!(freed + free >= bytes);
                    }
                    Err(_) => prop_assert_eq!(ledger.entries(now), before.clone()),
                },
                Op::Wait(seconds) => {
                    clock += seconds;
                    let now = start + Duration::from_secs(clock);
                    for id in ledger.expire(now) {
                        let (_, entry) = before.iter().find(|(other, _)| *other == id).unwrap();
                        prop_assert!(entry.held && entry.attached == 0 && entry.state == State::Ready);
                    }
                }
            }
            let now = start + Duration::from_secs(clock);
            prop_assert!(ledger.used(&Place::Host) <= LIMIT);
            for (id, entry) in before.iter().filter(|(_, entry)| entry.attached > 0) {
                prop_assert!(ledger.state(*id).is_some(), "attached and gone by {:?}: {:?}", op, entry);
            }
            let keys: std::collections::BTreeSet<_> = ledger.entries(now).into_iter().map(|(_, e)| (e.image, e.rank)).collect();
            prop_assert_eq!(keys.len(), ledger.entries(now).len(), "one arena a key");
        }
        for client in 0..3 {
            ledger.gone(client, start);
        }
        prop_assert!(ledger.entries(start).iter().all(|(_, entry)| entry.attached == 0));
    }
}
