//! What a cargo command built: the executables and libraries by package and target.
//!
//! A stage that runs a test with other surroundings takes the executable that `cargo test` made, rather than asking cargo for
//! that package alone: which features a dependency has depends on all packages that are named, so it would build most of
//! them anew.

use crate::{shell, workspace::Workspace};
use anyhow::{Context as _, Result, bail};
use cargo_metadata::Message;
use std::{
    collections::BTreeMap,
    io::BufReader,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Package, kind (`lib`, `test`, `bin`, `example`) and name of a target.
pub(crate) type Target = (&'static str, &'static str, &'static str);

/// What one or several cargo commands made.
#[derive(Debug, Default)]
pub(crate) struct Built {
    executables: BTreeMap<(String, String, String), Executable>,
    libraries: Vec<PathBuf>,
}

#[derive(Debug)]
struct Executable {
    file: PathBuf,
    /// The package's: where cargo runs it.
    folder: PathBuf,
}

impl Built {
    /// Runs a cargo command that builds, with its messages and errors in sight.
    pub(crate) fn by(workspace: &Workspace, words: &str) -> Result<Self> {
        let mut built = Self::default();
        built.and(workspace, words)?;
        Ok(built)
    }

    /// Adds what another command makes.
    pub(crate) fn and(&mut self, workspace: &Workspace, words: &str) -> Result<()> {
        let packages = workspace.metadata()?.packages;
        let mut cargo = workspace.cargo(words);
        cargo.args(["--quiet", "--message-format=json-render-diagnostics"]);
        let mut child =
            cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().with_context(|| shell::line(&cargo))?;
        let stream = BufReader::new(child.stdout.take().context("cargo's messages")?);
        for message in Message::parse_stream(stream) {
            let Message::CompilerArtifact(artifact) = message? else { continue };
            let Some(package) = packages.iter().find(|package| package.id == artifact.package_id) else {
                continue;
            };
            let shared = artifact.filenames.iter().filter(|file| file.extension() == Some("so"));
            self.libraries.extend(shared.map(|file| file.clone().into_std_path_buf()));
            let Some(file) = artifact.executable else { continue };
            let kind = if artifact.target.is_test() {
                "test"
            } else if artifact.target.is_example() {
                "example"
            } else if artifact.target.is_bin() {
                "bin"
            } else {
                "lib"
            };
            let folder = package.manifest_path.parent().context("a package's folder")?.to_owned().into();
            let key = (package.name.to_string(), kind.to_owned(), artifact.target.name);
            self.executables.insert(key, Executable { file: file.into(), folder });
        }
        if !child.wait()?.success() {
            bail!("{} failed", shell::line(&cargo));
        }
        Ok(())
    }

    /// The file of a target.
    pub(crate) fn file(&self, target: Target) -> Result<&Path> {
        Ok(&self.executable(target)?.file)
    }

    /// The target's program, to be run as cargo would.
    pub(crate) fn command(&self, target: Target) -> Result<Command> {
        let Executable { file, folder } = self.executable(target)?;
        let mut command = Command::new(file);
        command.current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
        Ok(command)
    }

    /// A shared library by its file's name.
    pub(crate) fn library(&self, name: &str) -> Result<&Path> {
        let found = self.libraries.iter().find(|file| file.file_name().is_some_and(|at| at == name));
        Ok(found.with_context(|| format!("{name} was not built"))?)
    }

    fn executable(&self, (package, kind, name): Target) -> Result<&Executable> {
        let key = (package.to_owned(), kind.to_owned(), name.to_owned());
        self.executables.get(&key).with_context(|| format!("{package} has no {kind} {name}"))
    }
}
