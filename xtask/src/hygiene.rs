//! No file of the repository names a path of somebody's machine or the host of a package registry: a clone is
//! to work anywhere, through whatever registry or mirror its user has set up.
//!
//! Lock files are generated and left out. The words looked for are put together here at run time, so that
//! this file passes its own check.

use crate::workspace::Workspace;
use std::{fs, path::Path};

/// Folders that only one machine has. `~`, `$HOME` and relative paths are what to write instead.
const MACHINE_FOLDERS: [&[&str]; 5] = [&["root"], &["home"], &["Users"], &["work"], &["tmp", "w"]];

/// Hosts of package registries, in parts. `index.` and the like in front of them count too.
const REGISTRIES: [[&str; 2]; 8] = [
    ["crates", "io"],
    ["pypi", "org"],
    ["pythonhosted", "org"],
    ["npmjs", "org"],
    ["npmjs", "com"],
    ["deb.debian", "org"],
    ["archive.ubuntu", "com"],
    ["proxy.golang", "org"],
];

/// Files that a tool writes.
const GENERATED: [&str; 2] = ["Cargo.lock", "fuzz/Cargo.lock"];

/// Every offending line, or `None` where there is no git checkout that says which files are ours.
pub(crate) fn check(workspace: &Workspace) -> Option<Vec<String>> {
    let words = Words::new(workspace.root());
    let mut wrong = Vec::new();
    for name in workspace.files()? {
        if GENERATED.contains(&name.as_str()) {
            continue;
        }
        // Deleted but still tracked, a link to nowhere, or no text: nothing to read in it.
        let Ok(text) = fs::read_to_string(workspace.path(&name)) else { continue };
        for (number, line) in text.lines().enumerate() {
            if let Some(what) = words.found_in(line) {
                wrong.push(format!("{name}:{}: {what}", number + 1));
            }
        }
    }
    Some(wrong)
}

struct Words {
    folders: Vec<String>,
    hosts: Vec<String>,
}

impl Words {
    fn new(root: &Path) -> Self {
        let mut folders: Vec<_> =
            MACHINE_FOLDERS.iter().map(|parts| format!("/{}/", parts.join("/"))).collect();
        folders.push(root.display().to_string());
        Self { folders, hosts: REGISTRIES.iter().map(|parts| parts.join(".")).collect() }
    }

    fn found_in(&self, line: &str) -> Option<String> {
        if let Some(folder) = self.folders.iter().find(|folder| has_folder(line, folder)) {
            return Some(format!("names a path of one machine ({folder})"));
        }
        let host = urls(line).find(|url| self.hosts.iter().any(|host| is_host(url, host)))?;
        Some(format!("names a package registry's host ({host})"))
    }
}

/// Whether `folder` begins an absolute path in `line`, not the middle of one.
fn has_folder(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line.get(..at).and_then(|b| b.chars().next_back());
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~}*".contains(c))
    })
}

/// The host of every http(s) URL in `line`.
fn urls(line: &str) -> impl Iterator<Item = &str> {
    ["http://", "https://"].into_iter().flat_map(move |scheme| {
        line.match_indices(scheme).filter_map(move |(at, _)| {
            let rest = line.get(at + scheme.len()..)?;
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || ".-".contains(c)));
            rest.get(..end.unwrap_or(rest.len()))
        })
    })
}

fn is_host(found: &str, host: &str) -> bool {
    found.strip_suffix(host).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> bool {
        Words::new(Path::new("/srv/clone")).found_in(line).is_some()
    }

    #[test]
    fn a_path_of_one_machine_is_found() {
        let home = ["", "home", "ann", "x"].join("/");
        assert!(found(&format!("cd {home}")));
        assert!(found(&format!("url = \"file://{home}\"")));
        assert!(found("see /srv/clone/target"));
        assert!(!found(&format!("$FLASHBOOT{home} and ~{home} and target{home}")));
        assert!(!found("a home/ of work/"));
    }

    #[test]
    fn a_url_of_a_package_registry_is_found() {
        let host = ["pypi", "org"].join(".");
        assert!(found(&format!("pip install -i https://{host}/simple x")));
        assert!(found(&format!("<http://index.{host}:80>")));
        assert!(!found(&format!("https://not{host}/simple")));
        assert!(!found(&format!("the registry {host} by name only")));
        assert!(!found("https://github.com/rust-lang/cargo"));
    }
}
