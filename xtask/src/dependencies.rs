//! `docs/dependencies.md` lists every direct third-party dependency, with who uses it and why.
//!
//! Who uses it is computed, and `cargo xtask fix` writes it; why is a person's line, and a row without one is
//! refused. A dependency counts as direct when a crate of ours names it or `[workspace.dependencies]` does.

use crate::{arrows::Graph, workspace::Workspace};
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};

/// The document, relative to the root.
pub(crate) const DOCUMENT: &str = "docs/dependencies.md";

/// Third-party crate → the crates of ours that use it.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Everything in which the document differs from the workspace.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<String>> {
    Ok(differences(&workspace.read(DOCUMENT)?, &uses(workspace)?))
}

/// The document with its `used by` column as it should be.
pub(crate) fn repaired(workspace: &Workspace) -> Result<String> {
    Ok(with_users(&workspace.read(DOCUMENT)?, &uses(workspace)?))
}

fn uses(workspace: &Workspace) -> Result<Uses> {
    let manifest: toml::Table = workspace.read("Cargo.toml")?.parse().context("Cargo.toml")?;
    Ok(collect(&workspace.graph()?, &manifest))
}

fn collect(graph: &Graph, manifest: &toml::Table) -> Uses {
    let mut uses = Uses::new();
    for krate in &graph.crates {
        for name in &krate.third_party {
            uses.entry(name.clone()).or_default().insert(short(&krate.name).to_owned());
        }
    }
    let shared = manifest
        .get("workspace")
        .and_then(|w| w.get("dependencies"))
        .and_then(toml::Value::as_table)
        .into_iter()
        .flatten();
    for (name, value) in shared {
        if value.get("path").is_none() {
            uses.entry(name.clone()).or_default();
        }
    }
    uses
}

fn short(name: &str) -> &str {
    name.strip_prefix("flashboot-").unwrap_or(name)
}

fn users(names: &BTreeSet<String>) -> String {
    if names.is_empty() {
        return "none yet".into();
    }
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// A table row: `` | `crate` | used by | why | ``.
struct Row<'a> {
    name: &'a str,
    users: &'a str,
    why: &'a str,
}

fn row(line: &str) -> Option<Row<'_>> {
    let inner = line.trim().strip_prefix("| `")?.strip_suffix('|')?;
    let (name, rest) = inner.split_once("` |")?;
    let (users, why) = rest.split_once('|')?;
    Some(Row { name, users: users.trim(), why: why.trim() })
}

fn differences(document: &str, uses: &Uses) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for row in document.lines().filter_map(row) {
        if !seen.insert(row.name) {
            wrong.push(format!("{DOCUMENT} lists {} twice", row.name));
        }
        let Some(names) = uses.get(row.name) else {
            wrong.push(format!("{DOCUMENT} lists {}, which is no dependency any more", row.name));
            continue;
        };
        if row.why.is_empty() {
            wrong.push(format!("{DOCUMENT} does not say why {} was chosen", row.name));
        }
        let users = users(names);
        if row.users != users {
            let name = row.name;
            wrong.push(format!(
                "{DOCUMENT}: {name} is used by {users}, not {}; run `cargo xtask fix`",
                row.users
            ));
        }
    }
    for name in uses.keys().filter(|name| !seen.contains(name.as_str())) {
        wrong.push(format!("{DOCUMENT} has no row for {name}"));
    }
    wrong
}

fn with_users(document: &str, uses: &Uses) -> String {
    let mut text = String::new();
    for line in document.lines() {
        match row(line).and_then(|row| Some((uses.get(row.name)?, row))) {
            Some((names, row)) => {
                text.push_str(&format!("| `{}` | {} | {} |", row.name, users(names), row.why));
            }
            None => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrows::Crate;

    fn sample() -> Uses {
        let graph = Graph {
            crates: vec![
                Crate {
                    name: "flashboot-core".into(),
                    third_party: ["blake3".to_owned()].into(),
                    ..Crate::default()
                },
                Crate {
                    name: "flashboot".into(),
                    third_party: ["blake3".to_owned()].into(),
                    ..Crate::default()
                },
            ],
        };
        let manifest = "[workspace.dependencies]\nrayon = \"1\"\nflashboot-core = { path = \"core\" }";
        collect(&graph, &manifest.parse().unwrap())
    }

    const GOOD: &str = "# t\n\n| crate | used by | why |\n|---|---|---|\n\
                        | `blake3` | core, flashboot | digests |\n| `rayon` | none yet | threads |\n";

    #[test]
    fn a_complete_table_passes() {
        assert_eq!(differences(GOOD, &sample()), [""; 0]);
    }

    #[test]
    fn missing_stale_double_and_unexplained_rows_are_refused() {
        let document =
            "| `blake3` | core, flashboot | |\n| `blake3` | core, flashboot | y |\n| `serde` | | x |\n";
        assert_eq!(
            differences(document, &sample()),
            [
                "docs/dependencies.md does not say why blake3 was chosen",
                "docs/dependencies.md lists blake3 twice",
                "docs/dependencies.md lists serde, which is no dependency any more",
                "docs/dependencies.md has no row for rayon",
            ]
        );
    }

    #[test]
    fn who_uses_it_is_checked_and_repaired() {
        let stale = GOOD.replace("core, flashboot", "core");
        assert_eq!(
            differences(&stale, &sample()),
            ["docs/dependencies.md: blake3 is used by core, flashboot, not core; run `cargo xtask fix`"]
        );
        assert_eq!(with_users(&stale, &sample()), GOOD);
    }
}
