//! A suite that cannot fail proves nothing: each planted defect must be found, by the cases that are for it.

#[allow(unreachable_pub)]
mod fixture;

use fixture::MockFixture;
use flashboot_backend_mock::{Bug, MockConfig};
use flashboot_conformance::{Outcome, run_in_tasks, table};

/// Runs the whole table and returns the names of the cases that failed.
fn failures(bug: Bug) -> Vec<String> {
    let failed = table().into_iter().filter_map(|case| {
        let fixture = MockFixture::boxed(MockConfig { bug: Some(bug), ..MockConfig::default() });
        match run_in_tasks(fixture, &case) {
            Outcome::Passed => None,
            Outcome::Failed(_) => Some(case.name().to_owned()),
        }
    });
    failed.collect()
}

/// The cases that each defect must fail. A new defect does not compile without a line here.
fn families(bug: Bug) -> &'static [&'static str] {
    match bug {
        Bug::DropsLastChunk => &["sizes/", "spans/", "broadcast/chain", "gather/"],
        Bug::OffByOne => &["sizes/", "spans/", "broadcast/star", "gather/"],
        Bug::CompletesEarly => &["sizes/", "spans/", "waiting/cancelled-and-pulled-again"],
        Bug::ReadsStaleGeneration => {
            &["generation/stale-before", "generation/stale-between", "generation/stale-during-an-unverified"]
        }
        Bug::PublishesBeforeVerifying => &["sizes/", "broadcast/chain", "repair/"],
    }
}

fn is_found(bug: Bug) {
    let failed = failures(bug);
    println!("{bug:?}: {} cases fail: {failed:?}", failed.len());
    for family in families(bug) {
        assert!(failed.iter().any(|name| name.starts_with(family)), "{bug:?} passes all of {family}");
    }
}

#[test]
fn the_suite_finds_a_dropped_last_chunk() {
    is_found(Bug::DropsLastChunk);
}

#[test]
fn the_suite_finds_an_off_by_one() {
    is_found(Bug::OffByOne);
}

#[test]
fn the_suite_finds_an_early_completion() {
    is_found(Bug::CompletesEarly);
}

#[test]
fn the_suite_finds_a_stale_generation_read() {
    is_found(Bug::ReadsStaleGeneration);
}

#[test]
fn the_suite_finds_a_publication_before_verification() {
    is_found(Bug::PublishesBeforeVerifying);
}
