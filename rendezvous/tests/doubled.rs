//! A message that is lost or comes twice changes nothing.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::{MemberId, Request};

fn whose(request: &Request) -> Option<MemberId> {
    match request {
        Request::Register(said) => Some(said.member),
        Request::Renew { member, .. } | Request::Lost { member, .. } | Request::Leave { member, .. } => {
            Some(*member)
        }
        _ => None,
    }
}

#[test]
fn what_came_comes_again_and_changes_nothing() {
    let doubled = std::cell::Cell::new(0u32);
    sim::seeds("doubled", |seed| {
        let mut world = sim::world(seed);
        let mut dice = sim::Dice::new(seed);
        world.trouble(800, false, |world| {
            let service = world.service.as_ref().unwrap();
            let before = service.status();
            let Some(at) = u64::try_from(world.history.len()).ok().filter(|n| *n > 0) else { return };
            // The last, and any.
            let last = world.history.last().unwrap();
            let any = &world.history[usize::try_from(dice.below(at)).unwrap()];
            for request in [last, any] {
                let known = whose(request).is_some_and(|id| before.members.iter().any(|m| m.member == id));
                if !known {
                    continue;
                }
                doubled.set(doubled.get() + 1);
                let mut twice = service.clone();
                twice.handle(world.now, request.clone());
                let after = twice.status();
                let graph = |status: &flashboot_rendezvous::protocol::Status| {
                    let of = |m: &flashboot_rendezvous::protocol::MemberStatus| {
                        (m.member, m.holds, m.upstream, m.readers.clone(), m.doubts)
                    };
                    status.members.iter().map(of).collect::<Vec<_>>()
                };
                // One that has no source may be given one by any sign of life.
                let waits = |id| before.members.iter().any(|m| m.member == id && m.upstream.is_none());
                if whose(request).is_some_and(waits) {
                    assert_eq!(after.members.len(), before.members.len());
                } else {
                    assert_eq!(graph(&after), graph(&before), "{request:?}");
                }
            }
        });
    });
    assert!(doubled.get() > 1000, "{} requests doubled", doubled.get());
}

#[test]
fn without_most_of_its_messages_the_world_still_completes() {
    sim::seeds("doubled", |seed| {
        let mut world = sim::world(seed);
        world.weather = sim::Weather { lose: 60, double: 30 };
        world.trouble(500, false, |_| ());
        assert!(world.settle(std::time::Duration::from_secs(120), |_| ()));
    });
}
