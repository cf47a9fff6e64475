//! The directory of the sockets: ours, and nobody else's to write.

use flashboot_core::{Code, Error, Kind, Result};
use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

/// `sun_path` has 108 bytes and ends with a zero.
const MAX_SOCKET_PATH: usize = 107;

fn io(op: &'static str, e: &std::io::Error, path: &Path) -> Error {
    let detail = path.display().to_string();
    match e.raw_os_error() {
        Some(errno) => Error::from_errno(op, errno, detail),
        None => Error::new(Kind::Io, op, format!("{detail}: {e}")),
    }
}

/// Makes the directory if it is missing, checks it, and returns its absolute path.
///
/// # Errors
/// [`Kind::Permission`] when it is a symbolic link, no directory, another user's, or open to others.
pub fn prepare(directory: &Path, shared: bool) -> Result<PathBuf> {
    let path = std::path::absolute(directory).map_err(|e| io("open", &e, directory))?;
    let mode = if shared { 0o711 } else { 0o700 };
    match fs::symlink_metadata(&path) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::NotFound => {
            match fs::DirBuilder::new().recursive(true).mode(mode).create(&path) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(io("mkdir", &e, &path)),
            }
            // The umask may have taken bits away. Checked first: another may have made it meanwhile.
            check(&path, false, 0o000)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .map_err(|e| io("chmod", &e, &path))?;
        }
        Err(e) => return Err(io("stat", &e, &path)),
    }
    check(&path, shared, 0o777)?;
    Ok(path)
}

/// Whether the directory, if it is there, is one that [`prepare`] would take, or could be made.
///
/// # Errors
/// As [`prepare`]; the system's own where it could not be made.
pub fn usable(directory: &Path) -> Result<()> {
    match fs::symlink_metadata(directory) {
        Ok(_) => check(directory, false, 0o777),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let parent = directory.ancestors().skip(1).find(|p| p.exists()).unwrap_or(Path::new("/"));
            let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
            rustix::fs::access(parent, access).map_err(|errno| {
                Error::from_errno(
                    "access",
                    errno.raw_os_error(),
                    format!("{} cannot be made in", parent.display()),
                )
            })
        }
        Err(e) => Err(io("stat", &e, directory)),
    }
}

fn check(path: &Path, shared: bool, mask: u32) -> Result<()> {
    let found = fs::symlink_metadata(path).map_err(|e| io("stat", &e, path))?;
    let refuse = |what: String, remedy: String| {
        Err(Error::new(Kind::Permission, "open", format!("{} {what}", path.display())).with_remedy(remedy))
    };
    let elsewhere = || "choose another socket directory".to_owned();
    if found.file_type().is_symlink() {
        return refuse("is a symbolic link, which others could turn".into(), elsewhere());
    }
    if !found.is_dir() {
        return refuse("is no directory".into(), elsewhere());
    }
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own {
        return refuse(format!("belongs to uid {}, not to us ({own})", found.uid()), elsewhere());
    }
    let (forbidden, wanted) = if shared { (0o022, 0o711) } else { (0o077, 0o700) };
    let mode = found.mode() & 0o777 & mask;
    if mode & forbidden != 0 {
        return refuse(
            format!("has mode {mode:04o}, which lets others in"),
            format!("run: chmod {wanted:o} {}", path.display()),
        );
    }
    if shared && mask != 0 && mode & 0o001 == 0 {
        return refuse(
            format!("has mode {mode:04o}, which keeps out the users that are allowed"),
            format!("run: chmod {wanted:o} {}", path.display()),
        );
    }
    Ok(())
}

/// `/run/user/UID/flashboot` where the system has `/run/user/UID`, `/tmp/flashboot-UID` elsewhere.
pub fn usual() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = Path::new("/run/user").join(uid.to_string());
    if runtime.is_dir() { runtime.join("flashboot") } else { PathBuf::from(format!("/tmp/flashboot-{uid}")) }
}

/// Checks that a socket can have this path; it must be text, since locators are.
///
/// # Errors
/// [`Kind::Invalid`] for a path that is too long or no text.
pub fn socket_path(path: &Path) -> Result<String> {
    let Some(text) = path.to_str() else {
        return Err(Error::new(Kind::Invalid, "open", format!("{} is not UTF-8", path.display()))
            .with_remedy("choose a socket directory with a plain name"));
    };
    if text.len() > MAX_SOCKET_PATH || text.contains('\0') {
        return Err(Error::new(
            Kind::Invalid,
            "open",
            format!("{text} has {} bytes, a Unix socket's path at most {MAX_SOCKET_PATH}", text.len()),
        )
        .with_code(Code::Errno(rustix::io::Errno::NAMETOOLONG.raw_os_error()))
        .with_remedy("choose a shorter socket directory"));
    }
    Ok(text.to_owned())
}
