//! A rank image in an object store (S3 and what speaks it) or behind an HTTP server that serves ranges.
//!
//! What proves the bytes comes from the same place, and is covered by the image's id: whoever names the id trusts nobody.

use super::{Delivered, Load, Source, SourceKind};
use crate::{
    io::{Each, Lane},
    pipeline::{Phase, Producer, fill},
};
use flashboot_checkpoint::{Manifest, Metadata};
use flashboot_core::{BLOCK, ByteRange, ByteSize, Error, Kind, Result};
use futures_util::future::try_join_all;
use object_store::{
    Error as StoreError, ObjectStore, ObjectStoreScheme, RetryConfig, aws::AmazonS3Builder,
    http::HttpBuilder, path::Path as ObjectPath,
};
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio::runtime::Runtime;

/// The longest `metadata.json` that is fetched.
const METADATA_CAP: u64 = 64 << 20;
/// The longest table that is fetched.
const TABLE_CAP: u64 = 1 << 30;

/// Where objects are, and how they are fetched.
#[derive(Clone, PartialEq, Eq)]
pub struct ObjectConfig {
    /// The image's directory: `s3://bucket/path`, `https://host/path`, or (on loopback, else only where allowed) `http://…`.
    pub url: String,
    /// Keys and values as `object_store` names them (`aws_region`, `aws_endpoint`, `aws_access_key_id` …).
    pub options: Vec<(String, String)>,
    /// Whether bytes may cross a network unencrypted. Digests protect them from change, nothing from being read.
    pub allow_http: bool,
    /// Bytes of one request; rounded to a power of two of at least 1 MiB.
    pub range: ByteSize,
    /// How often one range is asked for.
    pub attempts: u32,
    /// The longest one attempt may take.
    pub timeout: Duration,
}

impl ObjectConfig {
    /// Ranges of 8 MiB, each asked for at most four times, 30 s at a time.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            options: Vec::new(),
            allow_http: false,
            range: ByteSize::mib(8),
            attempts: 4,
            timeout: Duration::from_secs(30),
        }
    }
}

impl fmt::Debug for ObjectConfig {
    /// Values of options may be secrets: only their keys are shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<_> = self.options.iter().map(|(key, _)| key).collect();
        f.debug_struct("ObjectConfig").field("url", &self.url).field("options", &keys).finish_non_exhaustive()
    }
}

/// An image's objects, reachable.
pub struct ObjectImage {
    store: Box<dyn ObjectStore>,
    base: ObjectPath,
    config: ObjectConfig,
    /// `None` in drop only.
    runtime: Option<Runtime>,
    retries: AtomicU64,
    fetched: AtomicU64,
}

impl ObjectImage {
    /// Prepares to fetch from where `config` says; nothing is asked yet.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a URL or option that says nothing, [`Kind::Permission`] for plain HTTP to another host.
    pub fn open(config: ObjectConfig) -> Result<Self> {
        let invalid = |what: String| Error::new(Kind::Invalid, "object", format!("{}: {what}", config.url));
        let url: url::Url = config.url.parse().map_err(|e: url::ParseError| invalid(e.to_string()))?;
        if !url.username().is_empty() || url.password().is_some() {
            // Not with the URL, which would be in every message.
            return Err(Error::new(Kind::Invalid, "object", "a URL with a user or a password in it")
                .with_remedy("give credentials as options"));
        }
        let endpoint =
            |(key, value): &(String, String)| key.contains("endpoint") && is_plain_elsewhere(value);
        let plain = (url.scheme() == "http" && !is_here(&url)) || config.options.iter().any(endpoint);
        if plain && !config.allow_http {
            let detail = format!("{}: bytes would cross the network unencrypted", config.url);
            return Err(Error::new(Kind::Permission, "object", detail)
                .with_remedy("use https, or say that plain HTTP is allowed"));
        }
        let http = [("allow_http".to_owned(), "true".to_owned())];
        let options: Vec<_> = config.options.iter().cloned().chain(http).collect();
        let (scheme, base) = ObjectStoreScheme::parse(&url).map_err(|e| invalid(e.to_string()))?;
        let base = ObjectPath::parse(base).map_err(|e| invalid(e.to_string()))?;
        let store = store(&scheme, &url, options).map_err(|e| invalid(e.to_string()))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("flashboot-object")
            .enable_all()
            .build()
            .map_err(|e| Error::from_io("runtime", &e, "threads that fetch"))?;
        let (retries, fetched) = Default::default();
        Ok(Self { store, base, config, runtime: Some(runtime), retries, fetched })
    }

    /// Ranges that were asked for again.
    pub fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Bytes that came.
    pub fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    /// What proves the rank image called `rank` (the only one, unless named) of the image whose id is `id` or begins so
    /// (whichever it is, unless named).
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where there is none, [`Kind::Mismatch`] for another image, and what a manifest can be refused for.
    pub fn manifest(&self, rank: Option<&str>, id: Option<&str>) -> Result<Manifest> {
        Ok(self.manifest_bytes(rank, id)?.0)
    }

    /// The same, and the bytes that say it, for whoever is to check them too.
    ///
    /// # Errors
    /// As [`manifest`](Self::manifest).
    pub fn manifest_bytes(&self, rank: Option<&str>, id: Option<&str>) -> Result<(Manifest, Vec<u8>)> {
        let metadata = self.all("metadata.json", METADATA_CAP)?;
        let parsed = Metadata::check(&metadata)?;
        if id.is_some_and(|id| !parsed.id.starts_with(id)) {
            let detail = format!(
                "{}: is the image {}, {} is wanted",
                self.config.url,
                parsed.id,
                id.unwrap_or_default()
            );
            return Err(Error::new(Kind::Mismatch, "object", detail));
        }
        let entry = match (rank, parsed.ranks.as_slice()) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(rank), all) => all.iter().find(|entry| entry.coordinate.to_string() == rank),
        };
        let entry = entry.ok_or_else(|| {
            let names: Vec<_> =
                parsed.ranks.iter().take(16).map(|entry| entry.coordinate.to_string()).collect();
            let wanted = rank.unwrap_or("the only one");
            let detail = format!("{}: has no rank {wanted}: {}", self.config.url, names.join(", "));
            Error::new(Kind::Invalid, "object", detail)
        })?;
        let table = self.all(plain(&entry.table)?, TABLE_CAP.min(entry.table_bytes.saturating_add(1)))?;
        let bytes = [&(metadata.len() as u64).to_le_bytes()[..], &metadata, &table].concat();
        let manifest = Manifest::check(&bytes, &parsed.id, &entry.coordinate.to_string())?;
        Ok((manifest, bytes))
    }

    fn place(&self, name: &str) -> ObjectPath {
        self.base.child(name)
    }

    /// A small object, whole.
    fn all(&self, name: &str, cap: u64) -> Result<Vec<u8>> {
        let place = self.place(name);
        let len = self.retried(&place, || async { self.store.head(&place).await.map(|meta| meta.size) })?;
        if len > cap {
            let detail = format!("{place}: {len} bytes, at most {cap} are taken");
            return Err(Error::new(Kind::Corrupt, "object", detail));
        }
        if len == 0 {
            return Ok(Vec::new());
        }
        let bytes = self.retried(&place, || self.store.get_range(&place, 0..len))?;
        Ok(bytes.to_vec())
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let gone = || Error::new(Kind::Unavailable, "object", "its threads have ended");
        Ok(self.runtime.as_ref().ok_or_else(gone)?.block_on(work))
    }

    fn retried<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        place: &ObjectPath,
        ask: impl Fn() -> F,
    ) -> Result<T> {
        self.run(self.asked(place, ask))?
    }

    /// Asks until it works, as often as is allowed; what another try cannot help is said at once.
    async fn asked<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        place: &ObjectPath,
        ask: impl Fn() -> F,
    ) -> Result<T> {
        let mut attempt = 1;
        loop {
            let error = match tokio::time::timeout(self.config.timeout, ask()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(e)) => self.explain(place, &e),
                Err(_) => {
                    let detail = format!("{place}: no answer within {:?}", self.config.timeout);
                    Error::new(Kind::Deadline, "object", detail).with_peer(&self.config.url)
                }
            };
            let again = matches!(error.kind(), Kind::Deadline | Kind::SourceLost);
            if !again || attempt >= self.config.attempts.max(1) {
                return Err(error);
            }
            tracing::debug!(%error, attempt, "a range is asked for again");
            self.retries.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(50) * attempt).await;
            attempt += 1;
        }
    }

    fn explain(&self, place: &ObjectPath, e: &StoreError) -> Error {
        let kind = match e {
            StoreError::NotFound { .. } | StoreError::NotSupported { .. } | StoreError::NotImplemented => {
                Kind::Unavailable
            }
            StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => Kind::Permission,
            StoreError::InvalidPath { .. } => Kind::Invalid,
            _ => Kind::SourceLost,
        };
        Error::new(kind, "object", format!("{place}: {e}")).with_peer(&self.config.url)
    }
}

/// The store, which asks once: how often something is asked for is counted in one place, [`ObjectImage::asked`].
fn store(
    scheme: &ObjectStoreScheme,
    url: &url::Url,
    options: Vec<(String, String)>,
) -> Result<Box<dyn ObjectStore>, StoreError> {
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    match scheme {
        ObjectStoreScheme::AmazonS3 => {
            let builder = AmazonS3Builder::new().with_url(url.as_str()).with_retry(once);
            let with = |builder: AmazonS3Builder, (key, value): (String, String)| match key.parse() {
                Ok(key) => builder.with_config(key, value),
                // Whoever hands over an environment hands over more than this.
                Err(_) => builder,
            };
            Ok(Box::new(options.into_iter().fold(builder, with).build()?))
        }
        ObjectStoreScheme::Http => {
            let host = &url[..url::Position::BeforePath];
            let builder = HttpBuilder::new().with_url(host).with_retry(once);
            let with = |builder: HttpBuilder, (key, value): (String, String)| match key.parse() {
                Ok(key) => builder.with_config(key, value),
                Err(_) => builder,
            };
            Ok(Box::new(options.into_iter().fold(builder, with).build()?))
        }
        _ => Err(StoreError::NotSupported {
            source: "objects are fetched from s3://, https:// and http:// only".into(),
        }),
    }
}

fn is_here(url: &url::Url) -> bool {
    match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

/// A plain HTTP endpoint that is not this host.
fn is_plain_elsewhere(endpoint: &str) -> bool {
    // What is no URL is refused where it is used.
    endpoint.parse().is_ok_and(|url: url::Url| url.scheme() == "http" && !is_here(&url))
}

/// An image's files lie beside one another, without exception.
fn plain(name: &str) -> Result<&str> {
    if name.is_empty() || name.contains('/') || name == ".." {
        return Err(Error::new(Kind::Corrupt, "object", format!("`{name}` is no plain file name")));
    }
    Ok(name)
}

impl fmt::Debug for ObjectImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObjectImage").field(&self.config).finish()
    }
}

impl Drop for ObjectImage {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Within another runtime too.
            runtime.shutdown_background();
        }
    }
}

/// A rank image's payload among an image's objects.
#[derive(Debug)]
pub struct ObjectSource {
    image: ObjectImage,
    payload: String,
}

impl ObjectSource {
    /// The payload called `payload` of `image`: what its manifest says.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] for a name that leads elsewhere.
    pub fn new(image: ObjectImage, payload: &str) -> Result<Self> {
        Ok(Self { payload: plain(payload)?.to_owned(), image })
    }

    /// The image it is of.
    pub fn image(&self) -> &ObjectImage {
        &self.image
    }

    /// Bytes of the payload, as the store says. Blocks.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] where there is none; the store's own.
    pub fn measure(&self) -> Result<u64> {
        let place = self.image.place(&self.payload);
        let meta = self.image.retried(&place, || self.image.store.head(&place))?;
        Ok(meta.size)
    }
}

impl Source for ObjectSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Object
    }

    fn name(&self) -> String {
        format!("{}/{}", self.image.config.url.trim_end_matches('/'), self.payload)
    }

    fn probe(&self, load: &Load) -> Result<()> {
        let found = load.phases().time(Phase::Connect, || self.measure());
        let (found, needed) = (found?, load.wanted().payload);
        if found != needed {
            let detail = format!("{}: {needed} bytes needed, {found} found", self.name());
            return Err(Error::new(Kind::Corrupt, "object", detail));
        }
        Ok(())
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        fill(load.filling()?, self, load.config(), load.phases())?;
        Ok(Delivered::Filled)
    }
}

impl Producer for ObjectSource {
    fn at_least(&self) -> u64 {
        // Ranges of one call are under way together.
        BLOCK
    }

    fn produce(&self, _: &mut Lane, unit: ByteRange, into: &mut [u8], each: &mut Each<'_>) -> Result<()> {
        let size = self.image.config.range.0.clamp(1 << 20, 1 << 30).next_power_of_two();
        let place = self.image.place(&self.payload);
        let step = usize::try_from(size).unwrap_or(usize::MAX);
        let ranges = (0..into.len()).step_by(step).map(|at| {
            let start = unit.start + at as u64;
            let end = start.saturating_add(size).min(unit.end);
            let (image, place) = (&self.image, &place);
            async move {
                let bytes = image.asked(place, || image.store.get_range(place, start..end)).await?;
                if bytes.len() as u64 != end - start {
                    let detail = format!("{place}: {} bytes of {} at {start}", bytes.len(), end - start);
                    return Err(Error::new(Kind::SourceLost, "object", detail));
                }
                Ok((at, bytes))
            }
        });
        let fetched = self.image.run(try_join_all(ranges))??;
        for (at, bytes) in fetched {
            let place = into.get_mut(at..at + bytes.len());
            let place = place.ok_or_else(|| Error::new(Kind::Invalid, "object", "a range past its unit"))?;
            place.copy_from_slice(&bytes);
            self.image.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            each(at, place)?;
        }
        Ok(())
    }
}
