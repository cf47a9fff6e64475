//! The secret that both ends of a channel have, and how it is read.

use flashboot_core::{Error, Kind, Result};
use std::{
    fmt,
    fs::File,
    io::Read as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

/// Whoever sees a handshake can try texts against it: what people would think of is too short.
const SHORTEST: usize = 16;
const LONGEST: u64 = 4096;
const CONTEXT: &str = "flashboot 2026-11 channel token";

/// A key made from the token's text. The text itself is not kept.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(blake3::Hash);

impl Token {
    /// From a file of mode 0600; at least 16 bytes, a line's end aside. Blocks.
    ///
    /// # Errors
    /// [`Kind::Permission`] for a file that others may read or own, [`Kind::Invalid`] for what is no token.
    pub fn read(path: &Path) -> Result<Self> {
        let text = secret(path)?;
        let text = text.strip_suffix(b"\n").unwrap_or(&text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        Self::of(text).ok_or_else(|| {
            let (found, path) = (text.len(), path.display());
            Error::new(
                Kind::Invalid,
                "token",
                format!("{path} has {found} bytes; at least {SHORTEST} are safe"),
            )
            .with_remedy("write one with `openssl rand -hex 32`")
        })
    }

    /// Whether `text` is it, in a time that does not tell how much of it is right.
    pub fn is(&self, text: &[u8]) -> bool {
        Self::of(text).is_some_and(|other| other == *self)
    }

    pub(crate) fn of(text: &[u8]) -> Option<Self> {
        (text.len() >= SHORTEST).then(|| Self(blake3::Hash::from_bytes(blake3::derive_key(CONTEXT, text))))
    }

    pub(crate) fn key(&self) -> &[u8; 32] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The content of a file that only its owner, who is us or root, may read.
///
/// # Errors
/// [`Kind::Permission`] for one that others may read or own, [`Kind::Invalid`] for one that is no short regular file.
pub(crate) fn secret(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display().to_string();
    // A pipe in the file's place must not hold us up.
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(nonblock).open(path);
    let file = file.map_err(|e| Error::from_io("open", &e, &*shown))?;
    let found = file.metadata().map_err(|e| Error::from_io("fstat", &e, &*shown))?;
    if !found.is_file() || found.len() > LONGEST {
        let detail = format!("{shown} is no regular file of at most {LONGEST} bytes");
        return Err(Error::new(Kind::Invalid, "open", detail));
    }
    let (mode, owner, us) = (found.mode() & 0o777, found.uid(), rustix::process::geteuid().as_raw());
    if mode & 0o077 != 0 {
        return Err(Error::new(
            Kind::Permission,
            "open",
            format!("{shown} has mode {mode:04o}: others may read it"),
        )
        .with_remedy(format!("chmod 0600 {shown}")));
    }
    if owner != us && owner != 0 {
        let detail = format!("{shown} belongs to uid {owner}, who can change it; we are uid {us}");
        return Err(Error::new(Kind::Permission, "open", detail));
    }
    let mut content = Vec::new();
    file.take(LONGEST).read_to_end(&mut content).map_err(|e| Error::from_io("read", &e, &*shown))?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt as _};

    #[test]
    fn a_token_is_read_from_a_file_of_ours_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let with = |text: &[u8], mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Token::read(&path).map_err(|e| e.kind())
        };
        let token = with(b"0123456789abcdef\n", 0o600).unwrap();
        assert_eq!(with(b"0123456789abcdef\r\n", 0o400).unwrap(), token);
        assert_ne!(with(b"0123456789abcdeg", 0o600).unwrap(), token);
        assert_eq!(with(b"0123456789abcdef", 0o640), Err(Kind::Permission));
        assert_eq!(with(b"0123456789abcdef", 0o604), Err(Kind::Permission));
        assert_eq!(with(b"0123456789abcde\n", 0o600), Err(Kind::Invalid));
        assert_eq!(with(&[b'x'; 5000], 0o600), Err(Kind::Invalid));
        assert_eq!(Token::read(dir.path()).unwrap_err().kind(), Kind::Invalid);
        assert!(!format!("{token:?}").contains("0123"));
    }
}
