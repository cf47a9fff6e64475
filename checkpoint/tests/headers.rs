//! The table of headers, `cases/headers.jsonl`: each case's verdict is a test, each refusal its typed error, and
//! each accepted file goes through an image and comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a test may panic")]

mod support;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use flashboot_checkpoint::{
    Error, FieldProblem, Image, OpenOptions, PackOptions, UnpackOptions, VerifyOptions, pack, unpack, verify,
};
use flashboot_core::{ByteSize, Dtype, SizeError};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    expect: String,
    base64: String,
}

fn table() -> Vec<Case> {
    let text = include_str!("cases/headers.jsonl");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn write(name: &str) -> (TempDir, PathBuf, Vec<u8>) {
    let case = table().into_iter().find(|c| c.name == name).expect("the case is in the table");
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("case.safetensors");
    let bytes = STANDARD.decode(case.base64).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    (dir, path, bytes)
}

fn accepts(name: &str, options: &OpenOptions) {
    let (dir, path, bytes) = write(name);
    let checkpoint = flashboot_checkpoint::Checkpoint::open(&path, options).unwrap();
    let (image, back) = (dir.path().join("image"), dir.path().join("back"));
    pack(&checkpoint, &image, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&image).unwrap();
    assert!(verify(&image, &VerifyOptions::default(), &()).unwrap().ok);
    unpack(&image, &back, &UnpackOptions::default(), &()).unwrap();
    assert_eq!(std::fs::read(back.join("case.safetensors")).unwrap(), bytes);
}

/// Refused, with the file's name in the text.
fn refusal(name: &str) -> (PathBuf, Error) {
    let (_dir, path, _) = write(name);
    let error = support::open(&path).map(|_| ()).expect_err("refused");
    assert!(error.to_string().starts_with(&path.display().to_string()), "names the file: {error}");
    assert!(error.kind().is_refusal(), "{error:?}");
    (path, error)
}

fn form(file: PathBuf, field: &'static str, problem: FieldProblem) -> Error {
    Error::Field { file, tensor: "a".into(), field, problem }
}

macro_rules! accepted {
    ($($case:ident)*) => {
        $(#[test] fn $case() { accepts(stringify!($case), &OpenOptions::default()); })*
        const ACCEPTED: &[&str] = &[$(stringify!($case)),*];
    };
}

macro_rules! refused {
    ($($case:ident: |$file:ident| $error:expr;)*) => {
        $(#[test] fn $case() {
            let ($file, found) = refusal(stringify!($case));
            assert_eq!(found, $error);
        })*
        const REFUSED: &[&str] = &[$(stringify!($case)),*];
    };
}

accepted! {
    two_tensors keys_unsorted empty_object metadata_only trailing_spaces data_start_unaligned extra_field scalar
    empty_tensor empty_tensor_only dtype_bool dtype_u32 dtype_f8_e4m3 dtype_f8_e8m0 dtype_f8_e5m2fnuz dtype_f16
    f4_even odd_u8_then_f32 name_is_path
}

refused! {
    zero_byte_file: |file| Error::TooShort { file, found: 0 };
    header_length_zero: |file| Error::HeaderEmpty { file };
    header_longer_than_file: |file| Error::HeaderPastEnd { file, needed: 5008, found: 10 };
    header_length_2_63: |file| Error::HeaderOverCap { file, size: 1 << 63, cap: 100_000_000 };
    header_is_list: |file| Error::HeaderNotObject { file, found: "`[`".into() };
    truncated_payload: |file| Error::Truncated { file, tensor: "b".into(), needed: 132, found: 128 };
    trailing_bytes: |file| Error::Trailing { file, needed: 70, found: 74 };
    hole: |file| Error::Hole { file, tensor: "b".into(), begin: 12, needed: 8 };
    overlap_same: |file| Error::Overlap { file, tensor: "b".into(), other: "a".into(), begin: 0, end: 8 };
    end_before_begin: |file| Error::Reversed { file, tensor: "a".into(), begin: 8, end: 0 };
    negative_offset: |file| form(file, "data_offsets", FieldProblem::Negative(-8));
    negative_dim: |file| form(file, "shape", FieldProblem::Negative(-2));
    missing_dtype: |file| form(file, "dtype", FieldProblem::Missing);
    shape_exceeds_range: |file| Error::ShapeBytes { file, tensor: "a".into(), needed: 4000, found: 8 };
    duplicate_key_same_range: |file| Error::Duplicate { file, tensor: "a".into() };
    unknown_dtype: |file| Error::UnknownDtype { file, tensor: "a".into(), dtype: "Q9".into() };
    f4_odd_nibble: |file| Error::Shape {
        file, tensor: "a".into(), dtype: Dtype::F4, shape: vec![3], problem: SizeError::PartOfAByte { bits: 12 },
    };
    not_json: |file| match support::open(&write("not_json").1) {
        Err(Error::NotJson { detail, .. }) => Error::NotJson { file, detail },
        other => panic!("{other:?}"),
    };
}

#[test]
fn every_case_of_the_table_is_a_test_with_its_verdict() {
    for case in table() {
        let list = if case.expect == "accept" { ACCEPTED } else { REFUSED };
        assert!(list.contains(&case.name.as_str()), "{} has no test for `{}`", case.name, case.expect);
    }
    assert_eq!(table().len(), ACCEPTED.len() + REFUSED.len());
}

#[test]
fn trailing_bytes_are_accepted_when_asked_for() {
    accepts("trailing_bytes", &OpenOptions { allow_trailing_bytes: true, ..OpenOptions::default() });
}

#[test]
fn the_header_cap_is_the_callers() {
    let (_dir, path, _) = write("two_tensors");
    let open = |cap| {
        let options = OpenOptions { header_cap: ByteSize(cap), ..OpenOptions::default() };
        flashboot_checkpoint::Checkpoint::open(&path, &options).map(|c| c.tensors().len())
    };
    assert_eq!(open(108), Ok(2));
    let refused = open(107).unwrap_err();
    assert_eq!(refused, Error::HeaderOverCap { file: path.clone(), size: 108, cap: 107 });
    assert!(refused.to_string().contains("108 bytes, above the cap of 107"));
}

#[test]
fn what_the_header_grammar_allows_and_no_more() {
    use flashboot_checkpoint::Header;
    let parse = |text: &str| Header::parse(Path::new("f"), text.as_bytes()).map(|h| h.tensors.len());
    let good = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    assert_eq!(parse(good), Ok(1));
    assert_eq!(parse(&format!("{good}  ")), Ok(1));
    for bad in [format!("{good}\n"), format!("{good}\t "), format!("{good}{good}"), format!(" {good}")] {
        assert!(parse(&bad).is_err(), "{bad:?}");
    }
    for (text, field) in [
        (r#"{"a":{"dtype":5,"shape":[1],"data_offsets":[0,1]}}"#, "dtype"),
        (r#"{"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}"#, "shape"),
        (r#"{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}"#, "shape"),
        (r#"{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}}"#, "shape"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, "data_offsets"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}"#, "data_offsets"),
        (r#"{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}"#, "shape"),
        (r#"{"a":[]}"#, "tensor"),
        (r#"{"a":null}"#, "tensor"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(
            matches!(&error, Error::Field { tensor, field: f, .. } if tensor == "a" && *f == field),
            "{error:?}"
        );
    }
    assert!(matches!(
        parse(r#"{"__metadata__":{"k":1}}"#),
        Err(Error::Field { tensor, field: "__metadata__", .. }) if tensor == "__metadata__"
    ));
    assert_eq!(
        parse(r#"{"__metadata__":{"k":"1","k":"2"}}"#),
        Err(Error::Duplicate { file: "f".into(), tensor: "__metadata__.k".into() })
    );
    assert_eq!(parse(r#"{"__metadata__":null}"#), Ok(0));
    let deep = format!(r#"{{"a":{{"x":{}{}}}}}"#, "[".repeat(5000), "]".repeat(5000));
    assert!(parse(&deep).is_err(), "deep nesting is an error and no overflow of the stack");
}

mod random {
    use super::*;
    use flashboot_checkpoint::Header;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_read_back(
            given in prop::collection::vec(("[a-zA-Z0-9._\"\\\\é\u{1F600}]{1,12}", 0..22usize, prop::collection::vec(0u64..9, 0..4)), 0..12),
        ) {
            let mut made = Vec::new();
            for (name, dtype, shape) in given {
                let fits = Dtype::ALL[dtype].bytes_of(&shape).is_ok();
                if fits && !made.iter().any(|m: &support::Made| m.name == name) {
                    made.push(support::tensor(&name, Dtype::ALL[dtype], &shape));
                }
            }
            let json = support::header(&made, &[("format", "pt")]);
            let header = Header::parse(Path::new("f"), json.as_bytes()).unwrap();
            let data: usize = made.iter().map(|m| m.bytes.len()).sum();
            let len = (json.len() + data + 8) as u64;
            prop_assert_eq!(header.check_coverage(Path::new("f"), json.len() as u64 + 8, len, false), Ok(data as u64));
            let again: Vec<_> = header.tensors.iter()
                .map(|t| (t.name.to_owned(), t.dtype, t.shape.to_vec())).collect();
            let given: Vec<_> = made.iter().map(|m| (m.name.clone(), m.dtype, m.shape.clone())).collect();
            prop_assert_eq!(again, given);
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Header::parse(Path::new("f"), &bytes);
            let mut object = b"{".to_vec();
            object.extend(&bytes);
            object.push(b'}');
            let _ = Header::parse(Path::new("f"), &object);
        }

        #[test]
        fn no_damage_to_a_header_panics(at in 0usize..108, byte: u8) {
            let (_dir, path, mut bytes) = write("two_tensors");
            bytes[8 + at] = byte;
            std::fs::write(&path, &bytes).unwrap();
            let _ = support::open(&path);
        }
    }
}
