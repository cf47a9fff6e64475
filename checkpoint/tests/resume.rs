//! A pack that is stopped, and the one that goes on from what it has written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use flashboot_checkpoint::{
    Checkpoint, Error, Image, LayoutOptions, PackOptions, Parallel, Progress, VerifyOptions, pack_ranks,
    verify,
};
use flashboot_core::ByteSize;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use support::models::{Sizes, llama};
use support::{names, open, tree};
use tempfile::TempDir;

/// A model of which half is several times what is synced at once, in `m`; laid out for two ranks.
fn model(dir: &Path) -> (Checkpoint, LayoutOptions) {
    llama(&Sizes { hidden: 1024, mlp: 2048, vocab: 4096, ..Sizes::default() }).write(&dir.join("m"), 3);
    let parallel = Parallel { tp: 2, ..Parallel::default() };
    (open(&dir.join("m")).unwrap(), LayoutOptions { parallel, ..LayoutOptions::default() })
}

fn options(resume: bool) -> PackOptions {
    PackOptions { resume, sync_every: ByteSize::mib(1), ..PackOptions::default() }
}

/// Stops a pack when half of it is through.
#[derive(Default)]
struct Half(AtomicBool);

impl Progress for Half {
    fn advance(&self, done: u64, total: u64) {
        self.0.store(done * 2 > total, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_stopped_pack_leaves_nothing_or_what_the_next_goes_on_from() {
    let dir = TempDir::new().unwrap();
    let (checkpoint, wanted) = model(dir.path());
    let (i, whole) = (dir.path().join("i"), dir.path().join("whole"));
    let stopped = pack_ranks(&checkpoint, &i, &wanted, &options(false), &Half::default());
    assert!(matches!(stopped, Err(Error::Cancelled { .. })), "{stopped:?}");
    assert_eq!(names(dir.path()), ["m"], "nothing is left");
    let stopped = pack_ranks(&checkpoint, &i, &wanted, &options(true), &Half::default());
    assert!(matches!(stopped, Err(Error::Cancelled { .. })), "{stopped:?}");
    assert_eq!(names(dir.path()).len(), 2, "what was written is kept");
    pack_ranks(&checkpoint, &whole, &wanted, &PackOptions::default(), &()).unwrap();
    let went_on = pack_ranks(&checkpoint, &i, &wanted, &options(true), &()).unwrap();
    assert!(went_on.resumed > 0 && went_on.resumed < went_on.report.bytes, "{went_on:?}");
    assert_eq!(names(dir.path()), ["i", "m", "whole"]);
    assert!(tree(&i) == tree(&whole), "the same image as one that was never stopped");
    assert!(verify(&Image::open(&i).unwrap(), &VerifyOptions::default(), &()).unwrap().ok);
}

#[test]
fn what_somebody_else_could_have_put_there_is_not_gone_on_from() {
    let dir = TempDir::new().unwrap();
    let (checkpoint, wanted) = model(dir.path());
    let i = dir.path().join("i");
    let stopped = pack_ranks(&checkpoint, &i, &wanted, &options(true), &Half::default());
    assert!(matches!(stopped, Err(Error::Cancelled { .. })), "{stopped:?}");
    let partial = names(dir.path()).into_iter().find(|n| n.contains(".partial-")).expect("what was written");
    let (partial, victim) = (dir.path().join(partial), dir.path().join("victim"));
    std::fs::write(&victim, "precious").unwrap();
    let image = partial.join("target-0-0-0-0.img");
    std::fs::remove_file(&image).unwrap();
    symlink(&victim, &image).unwrap();
    std::fs::set_permissions(&partial, std::fs::Permissions::from_mode(0o777)).unwrap();
    let made = pack_ranks(&checkpoint, &i, &wanted, &options(true), &()).unwrap();
    assert_eq!(made.resumed, 0);
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
    assert!(verify(&Image::open(&i).unwrap(), &VerifyOptions::default(), &()).unwrap().ok);
}
