//! What a directory is that has no `metadata.json`, for a person who takes it for an image.

use crate::cause::Names;
use crate::error::Error;
use std::path::Path;

/// Says what `dir` holds and what to do. Looks at names only.
pub(super) fn without_metadata(dir: &Path) -> Error {
    let (found, remedy) = describe(dir);
    Error::NoMetadata { dir: dir.into(), found, remedy }
}

/// Whether a file of this name is a rank's payload or what is noted while it is written.
fn is_of_a_rank(name: &str) -> bool {
    let rank = name.starts_with("target-") || name.starts_with("draft-");
    rank && (name.ends_with(".img") || name.ends_with(".progress"))
}

/// Whether `dir` has ranks' payloads and nothing that makes it an image or a checkpoint.
pub(crate) fn has_ranks(dir: &Path) -> bool {
    names(dir).iter().any(|name| is_of_a_rank(name))
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn describe(dir: &Path) -> (String, String) {
    let names = names(dir);
    let listed = |wanted: &dyn Fn(&str) -> bool| {
        let mut listed = Names::default();
        names.iter().filter(|name| wanted(name)).for_each(|name| listed.push(name));
        listed
    };
    let own = dir.file_name().unwrap_or_default().to_string_lossy();
    if let Some((image, _)) = own.strip_prefix('.').and_then(|own| own.split_once(".partial-")) {
        let found = ", because it is what a pack of `{}` left that was killed or is still running";
        let remedy = "pack again to the same place (--resume goes on where it can)";
        return (found.replace("{}", image), remedy.into());
    }
    let ranks = listed(&is_of_a_rank);
    if !ranks.is_empty() {
        let found = format!(
            ", but parts of one ({ranks}): it was copied in part, or not finished by whatever copied it"
        );
        return (found, "copy all of the image, or pack it again".into());
    }
    let shards = listed(&|name| name.ends_with(".safetensors"));
    if !shards.is_empty() {
        let found = format!(", but files of a checkpoint ({shards})");
        return (found, "pack it first, or name the image that was packed of it".into());
    }
    let inside = listed(&|name| super::is_image(&dir.join(name)).unwrap_or(false));
    if let Some(first) = inside.first.first() {
        let remedy = format!("name {}", dir.join(first).display());
        return (format!("; images lie in it ({inside})"), remedy);
    }
    if names.is_empty() {
        return (" and is empty".into(), "check the path, or pack an image there".into());
    }
    (" and nothing else of one".into(), "check the path".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::Kind;

    /// The text for a directory of this name with these files.
    fn said(name: &str, files: &[&str]) -> String {
        let parent = tempfile::TempDir::new().unwrap();
        let dir = parent.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        for file in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, super::super::id::OPENING).unwrap();
        }
        let e = without_metadata(&dir);
        assert_eq!((e.kind(), e.op()), (Kind::Corrupt, "open"));
        assert!(e.remedy().is_some_and(|r| !r.is_empty() && e.to_string().ends_with(&r)), "{e}");
        e.to_string()
    }

    #[test]
    fn a_directory_that_is_no_image_is_told_by_what_it_holds() {
        for (name, files, what, remedy) in [
            (".m.partial-0123456789abcdef", &["target-0-0-0-0.img"][..], "a pack of `m` left", "--resume"),
            (
                "m",
                &["target-0-0-0-0.img", "target-0-0-0-0.json"],
                "(`target-0-0-0-0.img`)",
                "copy all of the image",
            ),
            ("m", &["a.safetensors", "config.json"], "of a checkpoint (`a.safetensors`)", "pack it first"),
            ("m", &["x/metadata.json"], "images lie in it (`x`)", "m/x"),
            ("m", &[], "is empty", "check the path"),
            ("m", &["notes.txt"], "nothing else of one", "check the path"),
        ] {
            let text = said(name, files);
            assert!(text.contains(what) && text.contains(remedy), "{text}");
        }
    }
}
