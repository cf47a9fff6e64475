//! Programs in C against the library as it was built: linked as a shared library, as a static one, by what pkg-config says, and with
//! the address sanitizer watching.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use flashboot_checkpoint::{Checkpoint, OpenOptions, PackOptions, pack};
use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tempfile::TempDir;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Where cargo leaves the library for tests.
fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let library = own.parent().unwrap().join(name);
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn image(place: &TempDir) -> PathBuf {
    let data: Vec<u8> = (0..15).flat_map(|i: u8| f32::from(i).to_le_bytes()).chain(0..77).collect();
    let header = r#"{"a":{"dtype":"F32","shape":[3,5],"data_offsets":[0,60]},"b":{"dtype":"U8","shape":[77],"data_offsets":[60,137]}}"#;
    let file = place.path().join("model.safetensors");
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(&file, bytes).unwrap();
    let at = place.path().join("image");
    let checkpoint = Checkpoint::open(&file, &OpenOptions::default()).unwrap();
    pack(&checkpoint, &at, &PackOptions::default(), &()).unwrap();
    at
}

/// What `cc` makes of a file of this crate's; warnings are errors.
fn compile<S: AsRef<OsStr>>(place: &TempDir, source: &str, more: &[S]) -> Result<PathBuf, String> {
    let program = place.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-o"]).arg(&program);
    cc.arg(Path::new(CRATE).join(source)).args(more);
    let output = cc.output().unwrap();
    if output.status.success() { Ok(program) } else { Err(said(&output)) }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Compiler's arguments for the shared library where cargo left it.
fn shared() -> Vec<String> {
    let library = built("libflashboot_capi.so");
    let folder = library.parent().unwrap().display();
    vec![
        format!("-I{CRATE}/include"),
        format!("-L{folder}"),
        "-lflashboot_capi".into(),
        format!("-Wl,-rpath,{folder}"),
    ]
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, said(&output));
    said(&output)
}

#[test]
fn the_committed_header_is_the_crates() {
    let made = cbindgen::generate(CRATE).unwrap();
    let mut text = Vec::new();
    made.write(&mut text);
    let committed = fs::read(Path::new(CRATE).join("include/flashboot.h")).unwrap();
    assert!(
        committed == text,
        "the header is not this crate's any more: cargo run -p flashboot-capi --example header"
    );
}

#[test]
fn the_example_runs_with_what_pkg_config_says() {
    let place = tempfile::tempdir().unwrap();
    let image = image(&place);
    // As somebody installs it.
    let prefix = place.path().join("prefix");
    for folder in ["include", "lib/pkgconfig"] {
        fs::create_dir_all(prefix.join(folder)).unwrap();
    }
    fs::copy(Path::new(CRATE).join("include/flashboot.h"), prefix.join("include/flashboot.h")).unwrap();
    symlink(built("libflashboot_capi.so"), prefix.join("lib/libflashboot_capi.so")).unwrap();
    let template = fs::read_to_string(Path::new(CRATE).join("flashboot.pc.in")).unwrap();
    let config = template
        .replace("@PREFIX@", prefix.to_str().unwrap())
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    assert!(!config.contains('@'), "{config}");
    fs::write(prefix.join("lib/pkgconfig/flashboot.pc"), &config).unwrap();
    let mut flags = fields(&config, &["Cflags", "Libs"]);
    let asked = Command::new("pkg-config")
        .args(["--cflags", "--libs", "flashboot"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .output();
    if let Ok(asked) = asked {
        assert!(asked.status.success(), "{}", said(&asked));
        let words = String::from_utf8(asked.stdout).unwrap();
        assert_eq!(words.split_whitespace().collect::<Vec<_>>(), flags);
    }
    flags.push(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    let program = compile(&place, "examples/boot.c", &flags).unwrap();
    let said = run(Command::new(program).arg(&image));
    assert!(said.contains("a F32 of 2 dimensions, 60 bytes"), "{said}");
    assert!(said.contains("bytes on cpu"), "{said}");
}

/// The flags of a `.pc` file, its variables put in.
fn fields(config: &str, wanted: &[&str]) -> Vec<String> {
    let mut variables: Vec<(String, String)> = Vec::new();
    let mut flags = Vec::new();
    for line in config.lines() {
        let expand = |text: &str, variables: &[(String, String)]| {
            variables
                .iter()
                .fold(text.to_owned(), |t, (name, value)| t.replace(&format!("${{{name}}}"), value))
        };
        if let Some((name, value)) = line.split_once('=') {
            let value = expand(value, &variables);
            variables.push((name.to_owned(), value));
        } else if let Some((field, value)) = line.split_once(':')
            && wanted.contains(&field)
        {
            flags.extend(expand(value, &variables).split_whitespace().map(str::to_owned));
        }
    }
    flags
}

#[test]
fn c_gets_the_images_bytes_and_its_mistakes_are_errors() {
    let place = tempfile::tempdir().unwrap();
    let image = image(&place);
    let program = compile(&place, "tests/contract.c", &shared()).unwrap();
    for part in ["bytes", "misuse"] {
        assert_eq!(run(Command::new(&program).args([part.as_ref(), image.as_os_str()])), "as promised\n");
    }
    let payload = image.join("target-0-0-0-0.img");
    let mut bytes = fs::read(&payload).unwrap();
    bytes[3] ^= 1;
    fs::write(&payload, bytes).unwrap();
    run(Command::new(&program).args(["damaged".as_ref(), image.as_os_str()]));
}

#[test]
fn a_static_library_does_the_same() {
    let place = tempfile::tempdir().unwrap();
    let image = image(&place);
    let library = built("libflashboot_capi.a");
    let flags = [
        format!("-I{CRATE}/include"),
        library.display().to_string(),
        "-lpthread".into(),
        "-ldl".into(),
        "-lm".into(),
    ];
    let program = compile(&place, "tests/contract.c", &flags).unwrap();
    run(Command::new(&program).args(["bytes".as_ref(), image.as_os_str()]));
}

#[test]
fn the_address_sanitizer_finds_nothing_in_either_program() {
    let place = tempfile::tempdir().unwrap();
    let image = image(&place);
    let watched = [shared(), vec!["-fsanitize=address".into()]].concat();
    for (source, arguments) in
        [("tests/contract.c", &["bytes"][..]), ("tests/contract.c", &["misuse"]), ("examples/boot.c", &[])]
    {
        let program = compile(&place, source, &watched).unwrap();
        let mut command = Command::new(program);
        command.args(arguments).arg(&image);
        // Leaks are not looked for: that needs ptrace, which containers refuse.
        command.env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0");
        run(&mut command);
    }
}

#[test]
fn torchs_allocator_and_a_gpu_arena_on_the_stand_in_driver() {
    let place = tempfile::tempdir().unwrap();
    let image = image(&place);
    for folder in ["lib", "state"] {
        fs::create_dir(place.path().join(folder)).unwrap();
    }
    symlink(built("libflashboot_cuda_sim.so"), place.path().join("lib/libcuda.so.1")).unwrap();
    let program = compile(&place, "tests/contract.c", &shared()).unwrap();
    let mut command = Command::new(program);
    command.args(["gpu".as_ref(), image.as_os_str()]).env_remove("CUDA_VISIBLE_DEVICES");
    command.env("LD_LIBRARY_PATH", place.path().join("lib"));
    run(command.env("FLASHBOOT_CUDA_SIM_DIR", place.path().join("state")));
}
