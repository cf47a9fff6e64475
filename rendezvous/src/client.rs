//! Asking the service: one connection, kept, and dialled again when it is gone; or none, within one process.

use crate::{
    Inside,
    protocol::{
        Answer, Content, Greeting, Hello, MAX_ANSWER, MAX_REQUEST, Reason, Request, Status, Wanted, decode,
        encode,
    },
    server::purpose,
    store::Store,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use flashboot_channel::{Channel, Dial, Endpoint, Liveness, Security, dial};
use flashboot_core::{Error, Kind, Result};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};

/// How long one question and its answer may take, with the dialling.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);
/// How long a store is waited for until it names a service.
const FIND: Duration = Duration::from_secs(2);
/// How soon to try again what failed for want of a connection.
pub(crate) const AGAIN: Duration = Duration::from_millis(100);

/// A client. Every question may be asked twice, so a connection that is gone is dialled again and it is asked again.
#[derive(Debug)]
pub struct Client {
    way: Way,
    security: Security,
    connection: Mutex<Option<Channel>>,
}

/// How the service is found.
#[derive(Debug)]
enum Way {
    Endpoint(Endpoint),
    /// Asked again whenever a connection is made: another service may be there by then.
    Store(Arc<dyn Store>),
    /// It is in this process.
    Inside(Arc<Inside>),
}

impl Client {
    /// Of the service at `endpoint`. Nothing is dialled before the first question.
    pub fn new(endpoint: Endpoint, security: Security) -> Self {
        Self { way: Way::Endpoint(endpoint), security, connection: Mutex::new(None) }
    }

    /// Of the service that `store` names. Nothing is dialled before the first question.
    pub fn through(store: Arc<dyn Store>, security: Security) -> Self {
        Self { way: Way::Store(store), security, connection: Mutex::new(None) }
    }

    /// Of the service in this process.
    pub fn inside(service: Arc<Inside>) -> Self {
        Self { way: Way::Inside(service), security: Security::default(), connection: Mutex::new(None) }
    }

    /// The service's address, as errors name it; or the store's.
    pub fn peer(&self) -> String {
        match &self.way {
            Way::Endpoint(endpoint) => endpoint.place(),
            Way::Store(store) => store.name(),
            Way::Inside(_) => "this process's service".into(),
        }
    }

    /// Asks, within 5 s; one that is being asked by another task waits for its turn first.
    ///
    /// # Errors
    /// The channel's own; [`Kind::Mismatch`] for a release that speaks no version of ours, [`Kind::Protocol`] for what
    /// is no answer. A refusal is an [`Answer`].
    pub async fn ask(&self, request: &Request) -> Result<Answer> {
        if let Way::Inside(service) = &self.way {
            return Ok(service.handle(request.clone()));
        }
        let late = |_| {
            Err(Error::new(Kind::Deadline, "rendezvous", format!("no answer within {ANSWER:?}"))
                .with_peer(self.peer()))
        };
        timeout(ANSWER, self.asked(request)).await.unwrap_or_else(late)
    }

    async fn asked(&self, request: &Request) -> Result<Answer> {
        let message = encode(request);
        let mut connection = self.connection.lock().await;
        // Taken out: a question that is given up half-way leaves no channel behind.
        if let Some(mut channel) = connection.take()
            && let Ok(answer) = self.round(&mut channel, &message).await
        {
            *connection = Some(channel);
            return Ok(answer);
        }
        let mut channel = self.dial().await?;
        let answer = self.round(&mut channel, &message).await?;
        *connection = Some(channel);
        Ok(answer)
    }

    async fn round(&self, channel: &mut Channel, message: &[u8]) -> Result<Answer> {
        channel.send(message, MAX_REQUEST, ANSWER).await?;
        let answer = channel.receive(MAX_ANSWER, ANSWER).await?.ok_or_else(|| self.closed())?;
        decode(&answer).map_err(|refusal| refusal.into_error("rendezvous", &self.peer()))
    }

    fn closed(&self) -> Error {
        Error::new(Kind::SourceLost, "rendezvous", "the service closed the connection").with_peer(self.peer())
    }

    async fn dial(&self) -> Result<Channel> {
        let how = Dial { purpose: purpose()?, timeout: ANSWER, liveness: Liveness::default() };
        let endpoint = match &self.way {
            Way::Endpoint(endpoint) => endpoint.clone(),
            Way::Store(store) => store.find(FIND).await?,
            Way::Inside(_) => {
                return Err(Error::new(Kind::Invalid, "rendezvous", "nothing is dialled in a process"));
            }
        };
        let mut channel = dial(&endpoint, &self.security, how).await?;
        channel.send(&encode(&Hello::ours()), MAX_REQUEST, ANSWER).await?;
        let greeting = channel.receive(MAX_ANSWER, ANSWER).await?.ok_or_else(|| self.closed())?;
        let refused = |refusal: crate::protocol::Refusal| refusal.into_error("hello", &self.peer());
        match decode::<Greeting>(&greeting).map_err(refused)? {
            Greeting::Welcome { version, release } => {
                tracing::debug!(peer = self.peer(), version, release, "the service answers");
                Ok(channel)
            }
            Greeting::Refused(refusal) => Err(refused(refusal)),
        }
    }

    /// An answer that nobody gives to what was asked.
    pub(crate) fn odd(&self, op: &'static str, answer: Answer) -> Error {
        match answer {
            Answer::Refused(refusal) => refusal.into_error(op, &self.peer()),
            _ => Error::new(Kind::Protocol, op, "the service answered something else").with_peer(self.peer()),
        }
    }
}

/// Whether it may be otherwise in a moment: nobody answered, rather than somebody with a no.
pub(crate) fn passing(error: &Error) -> bool {
    matches!(error.kind(), Kind::SourceLost | Kind::Deadline | Kind::Unavailable | Kind::Exhausted | Kind::Io)
}

/// What is meant by `wanted`, once it is there; asks again until `patience` is over.
///
/// # Errors
/// The service's last answer, as an error.
pub async fn find(client: &Client, wanted: &Wanted, patience: Duration) -> Result<Content> {
    let until = Instant::now() + patience;
    loop {
        let error = match client.ask(&Request::Find(wanted.clone())).await {
            Ok(Answer::Found(content)) => return Ok(content),
            Ok(Answer::Refused(refusal)) => {
                let later = refusal.reason == Reason::NoSuchImage;
                let error = refusal.into_error("find", &client.peer());
                if !later {
                    return Err(error);
                }
                error
            }
            Ok(other) => return Err(client.odd("find", other)),
            Err(error) if passing(&error) => error,
            Err(error) => return Err(error),
        };
        if Instant::now() >= until {
            return Err(error);
        }
        sleep(AGAIN).await;
    }
}

/// The manifest of `content`, whole and of the announced hash; whether it proves the image is the caller's to check.
///
/// # Errors
/// [`Kind::Deadline`] when no seed brings it within `patience`, [`Kind::Corrupt`] for another hash.
pub async fn fetch_manifest(client: &Client, content: &Content, patience: Duration) -> Result<Vec<u8>> {
    let until = Instant::now() + patience;
    let mut bytes: Vec<u8> = Vec::new();
    while (bytes.len() as u64) < content.manifest_bytes {
        let (manifest, offset) = (content.manifest.clone(), bytes.len() as u64);
        let wait = match client.ask(&Request::Fetch { manifest, offset }).await {
            Ok(Answer::Part { offset: at, part }) if at == offset => {
                let part = STANDARD.decode(part).unwrap_or_default();
                let room = content.manifest_bytes - offset;
                if part.is_empty() || part.len() as u64 > room {
                    let detail = format!("a part of {} bytes where {room} are missing", part.len());
                    return Err(Error::new(Kind::Protocol, "fetch", detail).with_peer(client.peer()));
                }
                bytes.extend(part);
                continue;
            }
            Ok(Answer::Wait { retry_ms, .. }) => Duration::from_millis(retry_ms.min(1000)),
            // The service came back, and its seeds have not yet.
            Ok(Answer::Refused(refusal)) if refusal.reason == Reason::NoSuchImage => AGAIN,
            Ok(other) => return Err(client.odd("fetch", other)),
            Err(error) if passing(&error) => AGAIN,
            Err(error) => return Err(error),
        };
        if Instant::now() >= until {
            let detail = format!("no seed brought the image's manifest within {patience:?}");
            return Err(Error::new(Kind::Deadline, "fetch", detail).with_peer(client.peer()));
        }
        sleep(wait).await;
    }
    if blake3::hash(&bytes).to_hex().as_str() != content.manifest {
        let detail = format!("{} bytes of manifest have another hash than {}", bytes.len(), content.manifest);
        return Err(Error::new(Kind::Corrupt, "fetch", detail).with_peer(client.peer()));
    }
    Ok(bytes)
}

/// Who holds what.
///
/// # Errors
/// Those of [`Client::ask`].
pub async fn status(client: &Client) -> Result<Status> {
    match client.ask(&Request::Status).await? {
        Answer::Status(status) => Ok(status),
        other => Err(client.odd("status", other)),
    }
}
