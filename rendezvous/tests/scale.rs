//! Ten thousand members: what a join costs does not grow with how many there are, and each link still carries one reader.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::{Answer, MemberId, Place, Registration, Request, Role, Rules, Service};
use std::{collections::BTreeMap, fs, time::Duration};

const MEMBERS: u64 = 10_000;
/// On each host.
const GPUS: u64 = 8;

fn member(word: u64, role: Role) -> Registration {
    let host = word / GPUS;
    let place = Place {
        host: format!("host-{host}"),
        gpu: Some(format!("gpu-{word}")),
        rack: Some(format!("rack-{}", host / 16)),
        ..Place::default()
    };
    Registration { place, ..sim::registration(word + 1, role, sim::content(0), host) }
}

/// Processor time of this thread: others may be busy beside it.
fn processor() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split_whitespace().next().unwrap().parse().unwrap())
}

#[test]
fn a_join_among_ten_thousand_costs_what_one_among_a_thousand_does() {
    let mut service = Service::new(Rules { lease: Duration::from_secs(3600), ..Rules::default() });
    let mut now = Duration::from_secs(1);
    let mut ask = |request| {
        now += Duration::from_micros(100);
        service.handle(now, request)
    };
    ask(Request::Register(member(0, Role::Seed)));
    let mut sources = BTreeMap::<MemberId, u64>::new();
    let mut took = Vec::new();
    let mut began = processor();
    for word in 1..MEMBERS {
        let Answer::Registered { plan: Some(plan), .. } = ask(Request::Register(member(word, Role::Clone)))
        else {
            panic!("clone {word} has no source");
        };
        *sources.entry(plan.upstream).or_default() += 1;
        if word % 1000 == 999 {
            took.push((processor() - began) / 1000);
            began = processor();
        }
    }
    eprintln!("processor time of a join, by thousands: {took:?}");
    // Ten times as many members; the median of the last ones beside that of the first, on whatever machine this is.
    let median = |part: &[Duration]| {
        let mut part = part.to_vec();
        part.sort();
        part[part.len() / 2]
    };
    let (early, late) = (median(&took[1..4]), median(&took[7..]));
    assert!(late < early * 3, "a join took {early:?} among some thousand, {late:?} among ten thousand");
    let most = sources.values().max().copied().unwrap();
    // The seed begins a chain for every 16 hops of the longest; nobody else is crowded.
    assert!(most <= 4, "one has {most} readers");
    let Answer::Status(status) = ask(Request::Status) else { panic!() };
    assert_eq!(status.members.len() as u64, MEMBERS);
    let host: BTreeMap<_, _> = status.members.iter().map(|m| (m.member, m.place.host.clone())).collect();
    let across = status.members.iter().filter(|m| m.upstream.is_some_and(|up| host[&up] != m.place.host));
    let mut by_host = BTreeMap::<&String, u32>::new();
    for m in across {
        *by_host.entry(&host[&m.upstream.unwrap()]).or_default() += 1;
    }
    let crossing: u32 = by_host.values().sum();
    assert!(
        u64::from(crossing) <= MEMBERS / GPUS * 3 / 2,
        "{crossing} copies between {} hosts",
        MEMBERS / GPUS
    );
}
