//! What pools promise: lifetimes, names, bounds.

use super::*;
use crate::budget::Budget;
use flashboot_core::{ByteSize, Kind};
use proptest::prelude::*;
use std::{thread, time::Duration};

const NOW: Duration = Duration::ZERO;

fn pool(limit: u64) -> (SlabPool, Budget) {
    let budget = Budget::new(ByteSize(limit));
    (SlabPool::new(budget.clone(), None), budget)
}

fn filled(pool: &SlabPool, capacity: u64, names: &[&str]) -> Vec<View> {
    let mut open = pool.take(capacity, NOW).unwrap();
    let each = usize::try_from(capacity).unwrap() / names.len().max(1);
    let place = |(i, name): (usize, &&str)| (name.to_string(), i * each..(i + 1) * each);
    for (i, byte) in open.as_mut_slice().iter_mut().enumerate() {
        *byte = (i / each.max(1)) as u8;
    }
    open.seal(names.iter().enumerate().map(place).collect())
}

#[test]
fn a_slab_dies_with_its_last_view_and_its_memory_is_used_again() {
    let (pool, budget) = pool(1 << 20);
    let mut views = filled(&pool, 8192, &["a", "b"]);
    assert_eq!((views[1].name(), views[1].as_slice()), ("b", &[1u8; 4096][..]));
    let again = views[0].clone();
    views.clear();
    assert_eq!((pool.held().len(), budget.used()), (1, 8192), "one view keeps all of it");
    assert_eq!(pool.held()[0].tensors, ["a"]);
    drop(again);
    assert_eq!((pool.held().len(), budget.used(), pool.bytes()), (0, 0, 8192));
    let views = filled(&pool, 8192, &["c"]);
    assert_eq!(pool.stats().allocations, 1, "the same memory again");
    drop(views);
    let release = pool.release();
    assert_eq!((release.freed, release.held.len(), pool.bytes()), (8192, 0, 0));
    assert_eq!(pool.take(1, NOW).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn what_escapes_is_named_and_goes_when_it_is_let_go_of() {
    let (pool, budget) = pool(1 << 20);
    let mut target = filled(&pool, 8192, &["layers.0.wq", "layers.0.wk"]);
    let kept = target.remove(1);
    drop(target);
    let release = pool.release();
    assert_eq!(release.held, [Held { bytes: 8192, tensors: vec!["layers.0.wk".into()] }]);
    let e = release.proved().unwrap_err();
    assert!(e.detail().contains("layers.0.wk") && !e.detail().contains("layers.0.wq"), "{e}");
    assert_eq!(kept.as_slice().len(), 4096, "its bytes are still there");
    drop(kept);
    assert_eq!((pool.bytes(), budget.used()), (0, 0), "a released pool keeps nothing");
    pool.release().proved().unwrap();
}

#[test]
fn who_waits_too_long_is_told_who_has_it() {
    let (pool, _) = pool(10_000);
    let views = filled(&pool, 8192, &["embed"]);
    let e = pool.take(8192, Duration::from_millis(5)).unwrap_err();
    assert!(e.kind() == Kind::Deadline && e.detail().contains("embed"), "{e}");
    let waiting = pool.clone();
    let waiter = thread::spawn(move || waiting.take(8192, Duration::from_secs(20)).is_ok());
    drop(views);
    assert!(waiter.join().unwrap());
}

#[test]
fn a_slab_that_is_given_up_while_it_is_filled_is_the_pools_again() {
    let (pool, budget) = pool(1 << 20);
    let open = pool.take(4096, NOW).unwrap();
    assert_eq!(pool.held(), [Held { bytes: 4096, tensors: vec![] }]);
    drop(open);
    assert!(pool.take(4096, NOW).unwrap().seal(Vec::new()).is_empty());
    assert_eq!((budget.used(), pool.held().len(), pool.stats().allocations), (0, 0, 1));
}

#[derive(Debug, Clone)]
enum Step {
    Take(u64, usize),
    Drop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (prop_oneof![Just(4096u64), Just(16_384), 1u64..20_000, 1u64..90_000], 0usize..4)
            .prop_map(|(bytes, views)| Step::Take(bytes, views)),
        (0usize..50).prop_map(Step::Drop),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn memory_stays_within_the_budget_or_one_oversize_and_all_of_it_is_freed(
        steps in prop::collection::vec(step(), 0..60),
    ) {
        const LIMIT: u64 = 65_536;
        let (pool, budget) = pool(LIMIT);
        // The model: each live view with its buffer and the buffer's charge.
        let mut views: Vec<(View, u64)> = Vec::new();
        let in_use = |views: &[(View, u64)]| {
            let mut seen = std::collections::BTreeMap::new();
            seen.extend(views.iter().map(|(view, charge)| (view.buffer(), *charge)));
            seen.values().sum::<u64>()
        };
        for step in steps {
            match step {
                Step::Take(bytes, count) => {
                    let used = in_use(&views);
                    let taken = pool.take(bytes, NOW);
                    prop_assert_eq!(taken.is_ok(), used == 0 || used + bytes <= LIMIT);
                    let Ok(mut open) = taken else { continue };
                    open.as_mut_slice().fill(views.len() as u8);
                    let names = (0..count).map(|i| (format!("t{i}"), i..i + 1)).collect();
                    views.extend(open.seal(names).into_iter().map(|view| (view, bytes)));
                }
                Step::Drop(which) if !views.is_empty() => drop(views.swap_remove(which % views.len())),
                Step::Drop(_) => {}
            }
            prop_assert_eq!(budget.used(), in_use(&views));
            // Kept buffers count too: all there is is within the budget, or is one that alone is larger.
            prop_assert!(pool.bytes() <= LIMIT.max(in_use(&views)));
        }
        views.clear();
        prop_assert_eq!(budget.used(), 0);
        pool.release().proved().unwrap();
        prop_assert_eq!(pool.bytes(), 0);
    }
}
