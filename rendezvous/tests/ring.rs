//! The ring of an all-gather, as the service answers for it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod sim;

use flashboot_rendezvous::protocol::{
    Answer, MemberId, Place, Reason, Request, Ring, RingNode, Role, Rules, Service,
};
use proptest::prelude::*;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

fn node(word: u64, host: u64, nodes: u32) -> RingNode {
    let said = sim::registration(word, Role::Clone, sim::content(0), host);
    let content = &said.content;
    RingNode {
        member: said.member,
        secret: said.secret,
        name: String::new(),
        image: content.image.clone(),
        rank: content.rank.clone(),
        bytes: content.bytes,
        nodes,
        place: Place { host: format!("host-{host}"), ..Place::default() },
        locators: Vec::new(),
        transports: Vec::new(),
        done: false,
        order: Vec::new(),
    }
}

fn ask(service: &mut Service, at: Duration, node: &RingNode) -> Answer {
    service.handle(at, Request::Ring(node.clone()))
}

fn ring(answer: Answer) -> Ring {
    let Answer::Ring(ring) = answer else { panic!("{answer:?}") };
    ring
}

fn order(ring: &Ring) -> Vec<MemberId> {
    ring.nodes.iter().map(|n| n.member).collect()
}

fn refused(answer: Answer) -> Reason {
    let Answer::Refused(refusal) = answer else { panic!("{answer:?}") };
    refusal.reason
}

/// Time passes for a service that is awake.
fn pass(service: &mut Service, from: Duration, to: Duration) {
    let mut now = from;
    while now < to {
        now += SECOND / 2;
        service.tick(now);
    }
}

#[test]
fn a_service_that_slept_takes_nobody_for_gone() {
    let mut service = Service::new(Rules { lease: 2 * SECOND, ..Rules::default() });
    let nodes = [1, 2, 3].map(|word| node(word, 1, 3));
    for node in &nodes {
        ask(&mut service, SECOND, node);
    }
    let asked = |now| move |service: &mut Service| ring(ask(service, now, &node(1, 1, 3))).nodes;
    assert!(asked(8 * SECOND)(&mut service).iter().all(|n| !n.gone), "seven seconds of nobody's silence");
    pass(&mut service, 8 * SECOND, 11 * SECOND);
    let gone: Vec<_> = asked(11 * SECOND)(&mut service).iter().map(|n| n.gone).collect();
    assert_eq!(gone.iter().filter(|gone| **gone).count(), 2, "awake, it hears who is silent: {gone:?}");
}

#[test]
fn all_come_before_any_begins_and_neighbours_share_hosts() {
    let mut service = Service::new(Rules::default());
    let nodes = [(1, 2), (2, 1), (3, 2), (4, 1)].map(|(word, host)| node(word, host, 4));
    for early in &nodes[..3] {
        assert!(matches!(ask(&mut service, SECOND, early), Answer::Wait { .. }));
    }
    let all = ring(ask(&mut service, SECOND, &nodes[3]));
    assert_eq!(order(&all), [1, 3, 0, 2].map(|i: usize| nodes[i].member));
    for node in &nodes {
        assert_eq!(ring(ask(&mut service, SECOND, node)), all, "doubled or late, the same");
    }
    assert_eq!(refused(ask(&mut service, SECOND, &node(9, 1, 4))), Reason::Full);
    let stolen = RingNode { secret: 77, ..nodes[0].clone() };
    assert_eq!(refused(ask(&mut service, SECOND, &stolen)), Reason::GenerationTaken);
    // Another number of nodes, or another name, is another ring.
    assert!(matches!(ask(&mut service, SECOND, &node(9, 1, 2)), Answer::Wait { .. }));
}

#[test]
fn one_that_dies_while_it_waits_is_not_waited_with_and_later_one_is_said_to_be_gone() {
    let mut service = Service::new(Rules { lease: 2 * SECOND, ..Rules::default() });
    ask(&mut service, SECOND, &node(1, 1, 2));
    // Three seconds later the first is silent: the second alone is no ring.
    pass(&mut service, SECOND, 4 * SECOND);
    assert!(matches!(ask(&mut service, 4 * SECOND, &node(2, 1, 2)), Answer::Wait { .. }));
    let began = ring(ask(&mut service, 4 * SECOND, &node(3, 1, 2)));
    assert!(began.nodes.iter().all(|n| !n.gone && !n.done));
    let done = RingNode { done: true, ..node(2, 1, 2) };
    pass(&mut service, 4 * SECOND, 7 * SECOND);
    let later = ring(ask(&mut service, 7 * SECOND, &done));
    let of = |word| later.nodes.iter().find(|n| n.member == node(word, 1, 2).member).unwrap();
    assert!(of(2).done && !of(2).gone && of(3).gone && !of(3).done);
}

#[test]
fn a_service_that_comes_back_is_told_the_order() {
    let mut service = Service::new(Rules::default());
    let nodes = [5, 3, 4].map(|word| node(word, word, 3));
    let order_ = [4, 5, 3].map(|word| node(word, 0, 3).member).to_vec();
    let told = RingNode { order: order_.clone(), ..nodes[0].clone() };
    // One that had not heard waits for others; a stranger too.
    assert!(matches!(ask(&mut service, SECOND, &nodes[1]), Answer::Wait { .. }));
    assert!(matches!(ask(&mut service, SECOND, &node(8, 8, 3)), Answer::Wait { .. }));
    let again = ring(ask(&mut service, SECOND, &told));
    assert_eq!(order(&again), order_);
    assert_eq!(again.nodes.iter().map(|n| n.locators.len()).collect::<Vec<_>>(), [0; 3]);
    assert_eq!(order(&ring(ask(&mut service, SECOND, &nodes[1]))), order_);
    assert_eq!(refused(ask(&mut service, SECOND, &node(8, 8, 3))), Reason::Full);
}

#[test]
fn what_is_no_ring_is_refused() {
    let mut service = Service::new(Rules::default());
    let me = node(1, 1, 2);
    let other = node(2, 1, 2).member;
    for bad in [
        RingNode { nodes: 0, ..me.clone() },
        RingNode { nodes: 257, ..me.clone() },
        RingNode { image: "x".into(), ..me.clone() },
        RingNode { order: vec![me.member], ..me.clone() },
        RingNode { order: vec![me.member, me.member], ..me.clone() },
        RingNode { order: vec![other, node(3, 1, 2).member], ..me.clone() },
        RingNode { order: vec![me.member, other, other], ..me.clone() },
    ] {
        assert_eq!(refused(ask(&mut service, SECOND, &bad)), Reason::Malformed, "{bad:?}");
    }
    let alone = ring(ask(&mut service, SECOND, &node(1, 1, 1)));
    assert_eq!(order(&alone), [me.member]);
}

proptest! {
    /// Whoever asks whenever, with whatever is doubled: all are told one order, of all who came.
    #[test]
    fn one_order_for_all(asks in prop::collection::vec((1u64..6, 0u64..1500), 1..60)) {
        let mut service = Service::new(Rules::default());
        let (mut now, mut known) = (SECOND, None);
        for (word, gap) in asks {
            now += Duration::from_millis(gap);
            match ask(&mut service, now, &node(word, word % 2, 3)) {
                Answer::Ring(ring) => {
                    let order = order(&ring);
                    prop_assert_eq!(order.len(), 3);
                    prop_assert!(order.contains(&node(word, 0, 3).member));
                    let known = known.get_or_insert_with(|| order.clone());
                    prop_assert_eq!(&order, known);
                }
                Answer::Wait { .. } => prop_assert!(known.is_none()),
                Answer::Refused(refusal) => {
                    prop_assert_eq!(refusal.reason, Reason::Full);
                    prop_assert!(known.is_some());
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}

#[test]
fn a_service_that_came_back_takes_nobody_for_gone_before_a_lease_is_over() {
    let rules = Rules::default();
    let mut service = Service::new(rules);
    let mut nodes = [1, 2, 3].map(|word| node(word, word, 3));
    let known = order(&ring({
        nodes[..2].iter().for_each(|node| drop(ask(&mut service, SECOND, node)));
        ask(&mut service, SECOND, &nodes[2])
    }));
    nodes.iter_mut().for_each(|node| node.order.clone_from(&known));
    let mut again = Service::new(rules);
    let gone = |ring: Ring| ring.nodes.iter().map(|n| n.gone).collect::<Vec<_>>();
    nodes[0].done = true;
    assert_eq!(gone(ring(ask(&mut again, SECOND, &nodes[0]))), [false; 3], "the others have yet to ask");
    assert_eq!(gone(ring(ask(&mut again, SECOND * 2, &nodes[1]))), [false; 3]);
    let late = SECOND + rules.lease;
    ask(&mut again, late - rules.lease / 4, &nodes[1]);
    assert_eq!(gone(ring(ask(&mut again, late, &nodes[0]))), [false, false, true]);
}
