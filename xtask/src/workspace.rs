//! Where the clone is, and what `cargo metadata` and `git` say is in it.

use anyhow::{Context as _, Result, bail};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::arrows::{Crate, Edge, Graph, Root, When};

/// The clone that this xtask was built from.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
    cargo: OsString,
}

impl Workspace {
    /// The folder above `xtask/`.
    pub(crate) fn find() -> Result<Self> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().context("xtask has no folder above it")?.to_path_buf();
        if !root.join("Cargo.toml").is_file() {
            bail!("{} is gone: build xtask again from the clone you are in", root.display());
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Ok(Self { root, cargo })
    }

    /// The clone's folder.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A path inside the clone.
    pub(crate) fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    /// A cargo command that runs at the root, with the arguments given as one line of words.
    pub(crate) fn cargo(&self, arguments: &str) -> Command {
        let mut command = Command::new(&self.cargo);
        command.args(arguments.split_whitespace()).current_dir(&self.root);
        command
    }

    /// What a file of the clone says.
    pub(crate) fn read(&self, relative: &str) -> Result<String> {
        fs::read_to_string(self.path(relative)).with_context(|| format!("reading {relative}"))
    }

    /// The workspace's own packages, without resolving anything.
    pub(crate) fn metadata(&self) -> Result<Metadata> {
        MetadataCommand::new()
            .cargo_path(&self.cargo)
            .manifest_path(self.path("Cargo.toml"))
            .no_deps()
            .exec()
            .context("cargo metadata")
    }

    /// Our crates, who uses whom, and the text of their roots.
    pub(crate) fn graph(&self) -> Result<Graph> {
        let metadata = self.metadata()?;
        let ours: BTreeSet<_> = metadata.packages.iter().map(|p| p.name.to_string()).collect();
        let crates = metadata.packages.iter().map(|p| read_crate(p, &ours)).collect::<Result<_>>()?;
        Ok(Graph { crates })
    }

    /// Every file that git tracks or would track; `None` where there is no git checkout to ask.
    pub(crate) fn files(&self) -> Option<Vec<String>> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.root)
            .output()
            .ok()?;
        if !listed.status.success() {
            return None;
        }
        let text = String::from_utf8_lossy(&listed.stdout);
        Some(text.split('\0').filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }
}

fn read_crate(package: &Package, ours: &BTreeSet<String>) -> Result<Crate> {
    let mut edges = Vec::new();
    let mut third_party = BTreeSet::new();
    for dependency in &package.dependencies {
        let when = match dependency.kind {
            DependencyKind::Development => When::Test,
            _ => When::Always,
        };
        if ours.contains(&dependency.name) {
            edges.push(Edge { to: dependency.name.clone(), when });
        } else {
            third_party.insert(dependency.name.clone());
        }
    }
    let roots = package
        .targets
        .iter()
        .filter(|t| !(t.is_example() || t.is_test() || t.is_bench() || t.is_custom_build()))
        .map(|t| {
            let text = fs::read_to_string(&t.src_path).with_context(|| format!("reading {}", t.src_path))?;
            let file = t.src_path.file_name().unwrap_or_default().to_owned();
            Ok(Root { file, text })
        })
        .collect::<Result<_>>()?;
    Ok(Crate { name: package.name.to_string(), edges, third_party, roots })
}
