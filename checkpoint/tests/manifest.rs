//! A manifest proves one rank image to who has nothing but the image's id.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{Coordinate, Error, Image, Manifest};
use support::{packed, sharded, small_moe};
use tempfile::TempDir;

const RANK: &str = "target-0-0-0-0";

fn manifest(dir: &TempDir) -> (Image, Vec<u8>) {
    sharded(&dir.path().join("m"), &small_moe());
    let image = packed(&dir.path().join("m"), &dir.path().join("i"));
    let bytes = Manifest::read(&image, image.rank(Coordinate::WHOLE).unwrap()).unwrap();
    (image, bytes)
}

#[test]
fn what_was_read_proves_the_image_and_carries_its_digests() {
    let dir = TempDir::new().unwrap();
    let (image, bytes) = manifest(&dir);
    let rank = image.rank(Coordinate::WHOLE).unwrap();
    let manifest = Manifest::check(&bytes, image.id(), RANK).unwrap();
    assert_eq!(manifest.table.digests(), rank.table.digests());
    assert_eq!(manifest.entry.payload_bytes, rank.payload_bytes);
    assert_eq!(manifest.metadata.id, image.id());
}

#[test]
fn every_changed_byte_and_every_cut_is_found() {
    let dir = TempDir::new().unwrap();
    let (image, bytes) = manifest(&dir);
    for at in (0..bytes.len()).step_by(7) {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert!(Manifest::check(&changed, image.id(), RANK).is_err(), "byte {at}");
        assert!(Manifest::check(&bytes[..at], image.id(), RANK).is_err(), "cut at {at}");
    }
    let longer = [&bytes[..], b" "].concat();
    assert!(Manifest::check(&longer, image.id(), RANK).is_err());
}

#[test]
fn another_image_and_another_rank_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let (image, bytes) = manifest(&dir);
    let other = Manifest::check(&bytes, &"ab".repeat(32), RANK).unwrap_err();
    assert!(matches!(&other, Error::ImageHash { found, .. } if found == image.id()), "{other}");
    let rank = Manifest::check(&bytes, image.id(), "target-0-1-0-0").unwrap_err();
    assert!(matches!(&rank, Error::NotAnImage { detail, .. } if detail.contains("target-0-1-0-0")), "{rank}");
}
