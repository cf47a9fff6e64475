//! Images in an S3 store: moto's server, from the Python environment that `cargo xtask test` makes for it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

#[path = "../../checkpoint/tests/support/mod.rs"]
mod support;

use flashboot_checkpoint::{Image, PackOptions, pack};
use flashboot_core::{ArenaSpec, Dtype, Kind};
use flashboot_loader::{
    io::IoConfig,
    pipeline::FillConfig,
    source::{Load, ObjectConfig, ObjectImage, ObjectSource, Source, SourceKind, Wanted},
};
use flashboot_memory::{HostArena, HostArenaConfig};
use libtest_mimic::{Arguments, Trial};
use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// The folder of Python packages that moto's server needs.
const PACKAGES: &str = "FLASHBOOT_CONFORMANCE_S3";

struct Store {
    child: Child,
    host: String,
}

impl Store {
    fn start(packages: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new("python3");
        command.env("PYTHONPATH", packages);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let store = Self { child, host: format!("127.0.0.1:{port}") };
        let began = Instant::now();
        while TcpStream::connect(&store.host).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "the store does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        store
    }

    fn put(&self, path: &str, body: &[u8]) {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        let signed = "authorization: AWS4-HMAC-SHA256 Credential=key/20261201/us-east-1/s3/aws4_request, \
                      SignedHeaders=host, Signature=0";
        let head = format!(
            "PUT {path} HTTP/1.1\r\nhost: {}\r\n{signed}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            self.host,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }

    fn config(&self, path: &str) -> ObjectConfig {
        let options = [
            ("aws_endpoint", format!("http://{}", self.host)),
            ("aws_region", "us-east-1".into()),
            ("aws_access_key_id", "key".into()),
            ("aws_secret_access_key", "secret".into()),
        ];
        let options = options.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        ObjectConfig { options, ..ObjectConfig::new(format!("s3://models/{path}")) }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn upload(store: &Store, at: &str, image: &Path) {
    for file in std::fs::read_dir(image).unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        store.put(&format!("/models/{at}/{name}"), &std::fs::read(file.path()).unwrap());
    }
}

fn an_image_is_loaded_from_a_bucket_and_a_damaged_object_is_refused(packages: &str) {
    let dir = tempfile::TempDir::new().unwrap();
    let shard = vec![support::tensor("a", Dtype::U8, &[20 << 20]), support::tensor("b", Dtype::F32, &[77])];
    support::sharded(&dir.path().join("m"), &[shard]);
    let at = dir.path().join("i");
    pack(&support::open(&dir.path().join("m")).unwrap(), &at, &PackOptions::default(), &()).unwrap();
    let image = Image::open(&at).unwrap();
    let store = Store::start(packages);
    store.put("/models", b"");
    upload(&store, "team/a", &at);
    let payload = std::fs::read(&image.ranks()[0].path).unwrap();
    let load = |path: &str| {
        let object = ObjectImage::open(store.config(path)).unwrap();
        let manifest = object.manifest(None, Some(image.id()))?;
        let wanted = Wanted {
            image: Some(image.id().into()),
            rank: manifest.entry.coordinate.to_string(),
            payload: manifest.entry.payload_bytes,
            digests: Arc::new(manifest.table.digests().clone()).into(),
        };
        let bytes = wanted.payload;
        let load = Load::new(wanted, FillConfig::new(&IoConfig::default()).unwrap(), move || {
            Ok(HostArena::create(ArenaSpec { payload: bytes, shards: 1 }, &HostArenaConfig::default())?.0
                as _)
        });
        let source: Box<dyn Source> = Box::new(ObjectSource::new(object, &manifest.entry.payload)?);
        load.run(&[source])
    };
    let (arena, report) = load("team/a").unwrap();
    let mut found = vec![0; payload.len()];
    arena.copy_out(0, &mut found).unwrap();
    assert!(found == payload);
    assert_eq!((report.source, report.verified), (Some(SourceKind::Object), true));
    let mut damaged = payload;
    damaged[3] ^= 1;
    store.put("/models/team/a/target-0-0-0-0.img", &damaged);
    assert_eq!(load("team/a").unwrap_err().kind(), Kind::Corrupt);
    store.put("/models/team/a/target-0-0-0-0.img", &damaged[..4096]);
    assert_eq!(load("team/a").unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(load("team/b").unwrap_err().kind(), Kind::Unavailable);
}

fn main() -> ExitCode {
    let packages = std::env::var(PACKAGES).ok();
    let missing = packages.is_none();
    let trial = Trial::test("an_image_is_loaded_from_a_bucket_and_a_damaged_object_is_refused", move || {
        an_image_is_loaded_from_a_bucket_and_a_damaged_object_is_refused(&packages.unwrap_or_default());
        Ok(())
    });
    let trial = if missing {
        trial
            .with_kind(format!("not run here: needs {PACKAGES}, which `cargo xtask test` sets"))
            .with_ignored_flag(true)
    } else {
        trial
    };
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}
