//! What every store must do, whoever says where the service is: one list of cases, which a [`Fixture`] cannot pick from.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "every test file uses a part of it")]

use crate::sim;
use async_trait::async_trait;
use flashboot_core::Kind;
use flashboot_rendezvous::{
    Client, Fault, Loss, Membership, fetch_manifest, find,
    protocol::{Content, MemberId, Registration, Role, Rules, Status, Wanted},
    status,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// How long anything may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A store with a service behind it.
#[async_trait]
pub(crate) trait Fixture: Sized + Send {
    async fn up() -> Self;
    /// Another client each time.
    fn client(&self) -> Arc<Client>;
    /// The store goes away as if killed; returns once no service answers any more.
    async fn away(&mut self);
    /// And comes back.
    async fn back(&mut self);
}

pub(crate) fn rules() -> Rules {
    Rules { lease: 2 * SECOND, ..Rules::default() }
}

pub(crate) fn manifest() -> Arc<Vec<u8>> {
    Arc::new((0..200_000u32).map(|i| (i % 251) as u8).collect())
}

pub(crate) fn content() -> Content {
    let manifest = manifest();
    let hash = blake3::hash(&manifest).to_hex().to_string();
    Content { manifest: hash, manifest_bytes: manifest.len() as u64, ..sim::content(0) }
}

pub(crate) fn said(word: u64, role: Role) -> Registration {
    sim::registration(word, role, content(), 1)
}

pub(crate) fn id(word: u64) -> MemberId {
    said(word, Role::Seed).member
}

pub(crate) async fn join(client: &Arc<Client>, said: Registration) -> flashboot_core::Result<Membership> {
    Membership::join(Arc::clone(client), said, manifest(), LIMIT).await
}

/// The status, once it is as wanted.
pub(crate) async fn until(client: &Client, wanted: impl Fn(&Status) -> bool) -> Status {
    let began = Instant::now();
    loop {
        let found = status(client).await;
        match found {
            Ok(found) if wanted(&found) => return found,
            other => assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}, but {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) fn wanted() -> Wanted {
    Wanted { image: None, model: Some("model-0".into()), revision: None, rank: None }
}

pub(crate) async fn a_clone_finds_the_image_its_manifest_and_its_source<F: Fixture>() {
    let up = F::up().await;
    let client = up.client();
    let began = Instant::now();
    let none = loop {
        let none = find(&client, &wanted(), Duration::ZERO).await.unwrap_err();
        // Until the store names a service it is that which is missing.
        if none.op() == "find" || began.elapsed() > LIMIT {
            break none;
        }
    };
    assert_eq!((none.kind(), none.op()), (Kind::Unavailable, "find"), "{none}");
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let found = find(&client, &wanted(), LIMIT).await.unwrap();
    assert_eq!(found, content());
    assert_eq!(fetch_manifest(&client, &found, LIMIT).await.unwrap(), *manifest());
    let clone = join(&client, said(2, Role::Clone)).await.unwrap();
    assert_eq!(clone.upstream(), Some(id(1)));
    assert_eq!(clone.holder(clone.upstream().unwrap()).unwrap().locators, said(1, Role::Seed).locators);
    clone.complete();
    let status = until(&client, |s| s.members[1].holds == sim::CHUNKS).await;
    assert_eq!((status.members[1].upstream, status.members[0].readers.len()), (None, 0));
    seed.leave(SECOND).await;
    until(&client, |s| s.members.len() == 1).await;
}

pub(crate) async fn a_store_that_comes_back_loses_nobody_and_is_done_without_meanwhile<F: Fixture>() {
    let mut up = F::up().await;
    let client = up.client();
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    let other = join(&up.client(), said(2, Role::Seed)).await.unwrap();
    let clone = join(&up.client(), said(3, Role::Clone)).await.unwrap();
    clone.progress(5);
    let first = clone.upstream().unwrap();
    up.away().await;
    // Alone, it finds the other of the two.
    let next = clone.lost(Loss { source: first, fault: Fault::Lost }, LIMIT).await.unwrap();
    assert_ne!(next, first);
    up.back().await;
    let status = until(&client, |s| s.members.len() == 3).await;
    let of = |word| status.members.iter().find(move |m| m.member == id(word)).unwrap();
    assert_eq!((of(3).upstream, of(3).holds), (Some(next), 5), "what it found by itself stands");
    assert_eq!((of(1).holds, of(2).holds), (sim::CHUNKS, sim::CHUNKS));
    assert_eq!(fetch_manifest(&client, &content(), LIMIT).await.unwrap(), *manifest());
    assert!(seed.evicted().is_none() && other.evicted().is_none() && clone.evicted().is_none());
}

pub(crate) async fn a_member_that_is_silent_is_forgotten_within_a_lease_or_so<F: Fixture>() {
    let up = F::up().await;
    let client = up.client();
    let seed = join(&client, said(1, Role::Seed)).await.unwrap();
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(status(&client).await.unwrap().members.len(), 1, "renewed");
    drop(seed);
    until(&client, |s| s.members.is_empty()).await;
}

pub(crate) async fn of_two_seeds_of_one_generation_the_second_is_refused_by_name<F: Fixture>() {
    let up = F::up().await;
    let client = up.client();
    let first = join(&client, said(1, Role::Seed)).await.unwrap();
    let taken = join(&up.client(), Registration { secret: 7, ..said(1, Role::Seed) }).await.unwrap_err();
    assert_eq!(taken.kind(), Kind::Mismatch);
    assert!(taken.detail().contains("another process holds"), "{taken}");
    // Also after the service has forgotten who was first: whoever comes first then has it, and the other is told.
    assert!(first.evicted().is_none());
    let other = Content { bytes: sim::CHUNKS + 1, ..content() };
    let mismatch = join(&up.client(), sim::registration(9, Role::Seed, other, 1)).await.unwrap_err();
    assert_eq!(mismatch.kind(), Kind::Mismatch, "{mismatch}");
    assert_eq!(status(&client).await.unwrap().members.len(), 1);
}

pub(crate) async fn a_later_member_of_a_name_replaces_the_earlier_which_is_told<F: Fixture>() {
    let up = F::up().await;
    let client = up.client();
    let named = |word| Registration { name: Some("node-1".into()), ..said(word, Role::Seed) };
    let earlier = join(&client, named(1)).await.unwrap();
    let later = join(&up.client(), named(2)).await.unwrap();
    let began = Instant::now();
    while earlier.evicted().is_none() {
        assert!(began.elapsed() < LIMIT);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(later.evicted().is_none());
    until(&client, |s| s.members.len() == 1 && s.members[0].member == id(2)).await;
}

pub(crate) async fn a_clone_that_loses_its_source_is_given_another<F: Fixture>() {
    let up = F::up().await;
    let client = up.client();
    let _seeds = (join(&client, said(1, Role::Seed)).await, join(&client, said(2, Role::Seed)).await);
    let clone = join(&up.client(), said(3, Role::Clone)).await.unwrap();
    let first = clone.upstream().unwrap();
    let next = clone.lost(Loss { source: first, fault: Fault::Refused }, LIMIT).await.unwrap();
    assert_ne!(next, first);
    let status = until(&client, |s| s.members.len() == 3).await;
    assert_eq!(status.members.iter().find(|m| m.member == id(3)).unwrap().upstream, Some(next));
    // It has nobody left to turn to.
    let none = clone.lost(Loss { source: next, fault: Fault::Refused }, SECOND).await;
    assert_eq!(none, None);
}

/// The cases, each a test of the fixture.
#[macro_export]
macro_rules! suite {
    ($name:ident, $fixture:ty) => {
        $crate::suite!(@ $name, $fixture,
            a_clone_finds_the_image_its_manifest_and_its_source
            a_store_that_comes_back_loses_nobody_and_is_done_without_meanwhile
            a_member_that_is_silent_is_forgotten_within_a_lease_or_so
            of_two_seeds_of_one_generation_the_second_is_refused_by_name
            a_later_member_of_a_name_replaces_the_earlier_which_is_told
            a_clone_that_loses_its_source_is_given_another
        );
    };
    (@ $name:ident, $fixture:ty, $($case:ident)*) => {
        mod $name {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::suite::$case::<$fixture>().await;
                }
            )*
        }
    };
}
