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

/// Whether a file of this name is a checkpoint's: a payload may have strayed to its side.
fn is_of_a_checkpoint(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".index.json")
}

/// Whether `dir` has ranks' payloads and nothing that makes it an image or a checkpoint. Not where it cannot be listed:
/// whoever opens it as something else says why.
pub(crate) fn is_half_an_image(dir: &Path) -> bool {
    let names = names(dir).unwrap_or_default();
    let whole = |name: &String| name == super::METADATA || is_of_a_checkpoint(name);
    names.iter().any(|name| is_of_a_rank(name)) && !names.iter().any(whole)
}

fn names(dir: &Path) -> std::io::Result<Vec<String>> {
    let name = |e: std::io::Result<std::fs::DirEntry>| Ok(e?.file_name().to_string_lossy().into_owned());
    let mut names = std::fs::read_dir(dir)?.map(name).collect::<std::io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

fn describe(dir: &Path) -> (String, String) {
    let names = match names(dir) {
        Ok(names) => names,
        Err(e) => {
            let remedy = "give this user access to it, and see that its disk is well";
            return (format!(", and what else it has cannot be listed ({e})"), remedy.into());
        }
    };
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
    let shards = listed(&is_of_a_checkpoint);
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
    fn a_directory_that_cannot_be_listed_is_not_called_empty() {
        let parent = tempfile::TempDir::new().unwrap();
        let text = without_metadata(&parent.path().join("gone")).to_string();
        assert!(text.contains("cannot be listed (") && !text.contains("is empty"), "{text}");
        assert!(!is_half_an_image(&parent.path().join("gone")));
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
