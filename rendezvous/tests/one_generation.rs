//! No two generations are mixed: who reads is sent to fillings of its own content only, by locators of that very filling,
//! and never to one that was replaced.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::{Answer, Reason, Request, Role, Rules, Service};
use std::time::Duration;

#[test]
fn every_plan_is_of_one_content_and_its_locators_of_one_filling() {
    // The world itself looks at every plan that it is given.
    sim::seeds("one_generation", |seed| {
        let mut world = sim::world(seed);
        world.trouble(1500, true, |world| {
            for (id, node) in world.nodes.iter().filter(|(_, n)| n.alive) {
                let Some(source) = node.upstream.and_then(|up| world.nodes.get(&up)) else { continue };
                assert_eq!(source.said.content, node.said.content, "{id} reads another content");
            }
        });
        assert!(world.history.iter().any(|request| matches!(request, Request::Lost { .. })) || seed != 0);
    });
}

fn refused(answer: Answer) -> Reason {
    match answer {
        Answer::Refused(refusal) => refusal.reason,
        other => panic!("{other:?}"),
    }
}

fn register(service: &mut Service, said: &flashboot_rendezvous::protocol::Registration) -> Answer {
    service.handle(Duration::from_millis(1), Request::Register(said.clone()))
}

#[test]
fn a_refilled_seed_replaces_its_earlier_filling() {
    let mut service = Service::new(Rules::default());
    let named = |word| {
        let mut said = sim::registration(word, Role::Seed, sim::content(0), 1);
        said.name = Some("node-1".into());
        said
    };
    let (old, new) = (named(1), named(2));
    assert!(matches!(register(&mut service, &old), Answer::Registered { .. }));
    assert!(matches!(register(&mut service, &new), Answer::Registered { .. }));
    let clone = sim::registration(3, Role::Clone, sim::content(0), 1);
    let Answer::Registered { plan: Some(plan), .. } = register(&mut service, &clone) else { panic!() };
    assert_eq!(plan.upstream, new.member);
    assert!(plan.holders.iter().all(|h| h.member != old.member));
    assert_eq!(refused(register(&mut service, &old)), Reason::Gone);
}

#[test]
fn two_processes_cannot_be_one_generation_nor_two_contents_one_image() {
    let mut service = Service::new(Rules::default());
    let seed = sim::registration(1, Role::Seed, sim::content(0), 1);
    assert!(matches!(register(&mut service, &seed), Answer::Registered { .. }));
    let mut twin = seed.clone();
    twin.secret ^= 1;
    assert_eq!(refused(register(&mut service, &twin)), Reason::GenerationTaken);
    let other = |change: fn(&mut flashboot_rendezvous::protocol::Content)| {
        let mut content = sim::content(0);
        change(&mut content);
        sim::registration(2, Role::Seed, content, 1)
    };
    assert_eq!(refused(register(&mut service, &other(|c| c.bytes += 1))), Reason::Mismatch);
    assert_eq!(refused(register(&mut service, &other(|c| c.fingerprint = "g".into()))), Reason::Mismatch);
    assert_eq!(refused(register(&mut service, &other(|c| c.manifest = "cd".repeat(32)))), Reason::Mismatch);
    // Another rank of the image is another content.
    let rank = other(|c| c.rank = "target-0-1-0-0".into());
    assert!(matches!(register(&mut service, &rank), Answer::Registered { .. }));
    // A locator of another filling, or of another size, is no locator of this one.
    let mut stolen = sim::registration(9, Role::Seed, sim::content(0), 1);
    stolen.locators = seed.locators.clone();
    assert_eq!(refused(register(&mut service, &stolen)), Reason::Mismatch);
    let mut long = sim::registration(9, Role::Seed, sim::content(5), 1);
    long.content.bytes += 1;
    long.holds += 1;
    assert_eq!(refused(register(&mut service, &long)), Reason::Mismatch);
}
