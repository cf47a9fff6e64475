//! What ten thousand members cost the server: its memory, its processor time while they renew, and that of a join.
//!
//! `cargo run --release -p flashboot-rendezvous --example bench_server [-- MEMBERS [SECONDS]]` (10000, 20). The server is a
//! process of its own, of one thread as `flashboot rendezvous` is; the members are the product's, in this process, each
//! with its own connection over loopback, a token, and the default lease of 10 s, so that each renews every 3.3 s.
//! The last line of stdout is one JSON object.
#![forbid(unsafe_code)]

#[path = "../tests/crowd/mod.rs"]
mod crowd;

use crowd::{Crowd, MANIFEST, Used};
use flashboot_channel::{Security, SecurityConfig};
use flashboot_rendezvous::{Client, Server, ServerConfig, descriptors, protocol::Rules, status};
use std::{
    error::Error,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

const MIB: f64 = 1048576.0;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let [verb, token] = arguments.as_slice()
        && verb == "serve"
    {
        return runtime.block_on(serve(Path::new(token)));
    }
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse());
    let (members, seconds) = (number(0, 10_000)?.max(2), number(1, 20)?.max(1));
    let needed = members + 64;
    let may = descriptors(needed);
    if may < needed {
        return Err(format!(
            "{members} connections need {needed} descriptors, {may} are allowed: raise ulimit -Hn"
        )
        .into());
    }
    let scratch = tempfile::Builder::new().prefix("flashboot-bench-").tempdir()?;
    let token = scratch.path().join("token");
    fs::write(&token, "a secret of enough bytes\n")?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    println!("{}", runtime.block_on(measured(&token, members, Duration::from_secs(seconds)))?);
    Ok(())
}

fn security(token: &Path) -> flashboot_core::Result<Security> {
    Security::load(&SecurityConfig { token_file: Some(token.to_owned()), ..SecurityConfig::default() })
}

/// Serves until its standard input is closed, which its parent's end does too.
async fn serve(token: &Path) -> Outcome<()> {
    let most = descriptors(20_256);
    let at = "127.0.0.1:0".parse()?;
    let config =
        ServerConfig { at, advertise: None, rules: Rules::default(), connections: usize::try_from(most)? };
    let server = Server::bind(config, &security(token)?).await?;
    println!("{}", server.endpoint());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        drop(stop);
    });
    Ok(server.serve(async { drop(stopped.await) }).await?)
}

/// Killed when dropped.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn measured(token: &Path, members: u64, hold: Duration) -> Outcome<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("serve").arg(token).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut serving = Serving(command.spawn()?);
    let pid = serving.0.id();
    let mut endpoint = String::new();
    BufReader::new(serving.0.stdout.take().ok_or("no stdout")?).read_line(&mut endpoint)?;
    let endpoint = endpoint.trim().parse()?;
    let security = security(token)?;

    let (began, start) = (Instant::now(), Used::by(pid)?);
    let crowd = Crowd::join(&endpoint, &security, members - 1).await?;
    let (took, joined) = (began.elapsed(), Used::by(pid)?);
    eprintln!("{members} members joined in {took:.1?}");
    // What was begun while they joined is not of the time after it.
    let lease = Rules::default().lease;
    tokio::time::sleep(lease / 2).await;
    let (began, before) = (Instant::now(), Used::by(pid)?);
    tokio::time::sleep(hold).await;
    let (held, after) = (began.elapsed(), Used::by(pid)?);
    if let Some(astray) = crowd.astray(lease) {
        return Err(format!("not all of them are held: {astray}").into());
    }
    // The largest answer that it gives counts as its memory too.
    let known = status(&Client::new(endpoint, security)).await?.members.len() as u64;
    if known != members {
        return Err(format!("{known} members of {members} are known").into());
    }
    let peak = Used::by(pid)?.peak as f64 / MIB;
    let cores = (after.processor - before.processor).as_secs_f64() / held.as_secs_f64();
    // A join is everything that a member asks until it is one, with the renewals of who was there before it.
    let join = (joined.processor - start.processor).as_secs_f64() * 1e6 / members as f64;
    let how = format!("{members} members with a connection and a token each over loopback, lease {lease:?}");
    let rows = [
        ("server: memory at its peak", "≤ 200 MiB", peak, 200.0, format!("{how}, a status of all asked")),
        (
            "server: processor time ÷ time while all renew",
            "≤ 1",
            cores,
            1.0,
            format!("{how}, over {held:.0?}"),
        ),
        (
            "server: processor time a join",
            "≤ 200 µs",
            join,
            200.0,
            format!("{how}; each dials, finds, fetches a manifest of {MANIFEST} bytes and registers"),
        ),
    ];
    drop(crowd);
    // As printed, so that the two agree at the edge.
    let rows = rows.map(|(name, target, measured, bound, how)| {
        let measured = (measured * 1e3).round() / 1e3;
        serde_json::json!({ "name": name, "target": target, "measured": measured, "ok": measured <= bound, "how": how })
    });
    Ok(serde_json::json!({ "rows": rows }).to_string())
}
