//! A simulated host, and the contract program on it.

#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

/// A host of its own for one test.
pub(crate) struct Host {
    dir: tempfile::TempDir,
    variables: BTreeMap<String, String>,
}

impl Host {
    /// Two devices, no IMEX channel, no faults.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("lib")).unwrap();
        fs::create_dir(dir.path().join("state")).unwrap();
        // The versioned name, so that a real driver of this machine is not found first.
        symlink(library(), dir.path().join("lib/libcuda.so.1")).unwrap();
        Self { dir, variables: BTreeMap::new() }
    }

    /// Sets one of the stand-in's variables.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(format!("FLASHBOOT_CUDA_SIM_{name}"), value.to_owned());
        self
    }

    /// Opens an IMEX channel.
    #[allow(dead_code, reason = "one of the test programs needs no channel")]
    pub(crate) fn with_imex(self) -> Self {
        fs::create_dir(self.dir.path().join("state/imex")).unwrap();
        self
    }

    /// What each case says, in order.
    pub(crate) fn ask(&self, cases: &[&str]) -> Vec<(String, String)> {
        let output = Command::new(env!("CARGO_BIN_EXE_driver-contract"))
            .args(cases)
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("LD_LIBRARY_PATH", self.dir.path().join("lib"))
            .env("FLASHBOOT_CUDA_SIM_DIR", self.dir.path().join("state"))
            .envs(&self.variables)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        rows(&String::from_utf8(output.stdout).unwrap())
    }

    /// What one case says.
    #[allow(dead_code, reason = "one of the test programs asks for all")]
    pub(crate) fn answer(&self, case: &str) -> String {
        self.ask(&[case]).pop().unwrap().1
    }
}

/// `case: outcome` lines.
pub(crate) fn rows(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_once(": ").unwrap()).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// The stand-in, where cargo leaves it for tests.
fn library() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_driver-contract")).parent().unwrap();
    let library = folder.join("deps/libflashboot_cuda_sim.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}
