//! A simulated host with GPUs: the stand-in driver in the real one's place.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part; tests panic")]

use super::Place;
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

/// The stand-in as `libcuda.so.1`, and a state that its processes share.
pub(crate) struct Driver {
    place: PathBuf,
    variables: Vec<(String, String)>,
}

impl Driver {
    /// Two GPUs without an IMEX channel, in a directory of `place`.
    pub(crate) fn new(place: &Place) -> Self {
        let place = place.path("driver");
        fs::create_dir_all(place.join("lib")).unwrap();
        fs::create_dir_all(place.join("state")).unwrap();
        symlink(library(), place.join("lib/libcuda.so.1")).unwrap();
        Self { place, variables: Vec::new() }
    }

    /// Sets this one of the stand-in's variables, and no other.
    pub(crate) fn only(&mut self, name: &str, value: &str) {
        self.variables = vec![(format!("FLASHBOOT_CUDA_SIM_{name}"), value.to_owned())];
    }

    /// This fault, in the first process that it can strike from now on.
    pub(crate) fn strike_once(&mut self, fault: &str) {
        let _ = fs::remove_file(self.place.join("state/once-0"));
        self.only("FAULTS", &format!("once:{fault}"));
    }

    /// Opens an IMEX channel.
    pub(crate) fn with_imex(self) -> Self {
        fs::create_dir(self.place.join("state/imex")).unwrap();
        self
    }

    /// Keeps every call waiting that asks for memory, in whatever process, until what it gives is dropped.
    pub(crate) fn hang(&self) -> fs::File {
        let lock = self.place.join("state/lock");
        let lock = fs::File::options().create(true).truncate(false).write(true).open(lock).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        lock
    }

    /// `command` on this host.
    pub(crate) fn on(&self, mut command: Command) -> Command {
        command
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("LD_LIBRARY_PATH", self.place.join("lib"))
            .env("FLASHBOOT_CUDA_SIM_DIR", self.place.join("state"))
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// The stand-in, where cargo leaves it for tests.
fn library() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_flashboot")).parent().unwrap();
    let library = folder.join("deps/libflashboot_cuda_sim.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}
