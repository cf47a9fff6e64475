//! An initramfs: a cpio archive in the `newc` format, which the kernel unpacks into memory.

use anyhow::{Context as _, Result};
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path},
};

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_777;

/// The archive while it grows.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
    inode: u32,
}

impl Archive {
    /// A folder, and those above it.
    pub(crate) fn folder(&mut self, at: &str) {
        if let Some((above, _)) = at.rsplit_once('/') {
            self.folder(above);
        }
        if !at.is_empty() {
            self.entry(at, FOLDER, &[]);
        }
    }

    /// A file with these bytes and this mode.
    pub(crate) fn file(&mut self, at: &str, mode: u32, bytes: &[u8]) {
        self.above(at);
        self.entry(at, FILE | mode, bytes);
    }

    /// A file of this machine, with its mode.
    pub(crate) fn copy(&mut self, at: &str, from: &Path) -> Result<()> {
        let bytes = fs::read(from).with_context(|| from.display().to_string())?;
        let mode = fs::metadata(from)?.permissions().mode() & 0o777;
        self.file(at, mode, &bytes);
        Ok(())
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, at: &str, to: &str) {
        self.above(at);
        self.entry(at, LINK, to.as_bytes());
    }

    /// The whole archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn above(&mut self, at: &str) {
        if let Some((above, _)) = at.rsplit_once('/') {
            self.folder(above);
        }
    }

    /// One entry; the first of a name stays.
    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        debug_assert!(Path::new(name).components().all(|c| matches!(c, Component::Normal(_))), "{name}");
        if !self.names.insert(name.to_owned()) {
            return;
        }
        self.inode += 1;
        let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
        let fields =
            [self.inode, mode, 0, 0, links, 0, bytes.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").into_bytes());
        }
        self.bytes.extend(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn an_entry_has_its_header_its_name_and_its_bytes_each_padded() {
        let mut archive = Archive::default();
        archive.file("a/b", 0o755, b"hello");
        archive.file("a/b", 0o755, b"again");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with("0707010000000100004"), "{text}");
        // The folder above, the file once, the trailer.
        assert_eq!(text.matches("070701").count(), 3);
        assert!(text.contains("a/b\0") && text.contains("hello\0\0\0") && !text.contains("again"));
        assert!(bytes.len().is_multiple_of(4));
    }

    #[test]
    fn cpio_reads_it_where_there_is_one() {
        if !crate::shell::succeeds(Command::new("cpio").arg("--version")) {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        archive.file("x/y", 0o644, b"z");
        archive.link("l", "x/y");
        fs::write(folder.path().join("i"), archive.finish()).unwrap();
        let listed = Command::new("cpio").args(["-t", "-F"]).arg(folder.path().join("i")).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "x\nx/y\nl\n");
    }
}
