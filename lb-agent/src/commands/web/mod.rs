//! The command `web`: the pages of [`lb_web`] over the pinned maps. The agent serves the same pages at
//! `--web-bind-address`.

mod data;
mod events;

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use lb_web::{Access, Token};
use tokio::{
    net::TcpListener,
    runtime,
    signal::unix::{SignalKind, signal},
};

use self::data::Data;
use super::output::print;
use crate::{cli::WebArgs, config::KernelPaths, daemon::named_files::read_token, http_server};
use lb_datapath::Pinned;

/// The HTTP routes of all pages. Must be called inside a Tokio runtime.
pub fn pages(paths: KernelPaths, access: Access) -> Router {
    lb_web::router(Data::new(paths), access)
}

/// Runs `web`: serves the pages until a signal arrives.
///
/// # Errors
/// There is no data plane, the address is taken, or the token cannot be read.
pub fn web(paths: &KernelPaths, args: &WebArgs) -> anyhow::Result<()> {
    // The pages can show that there is no data plane. At the start, however, that is an error: the path is probably
    // mistyped.
    Pinned::open(&paths.bpffs)?;
    let (access, note) = access(args)?;
    let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let served = runtime.block_on(async {
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.with_context(|| {
            format!("cannot listen on {}: give another address with --listen", args.listen)
        })?;
        let address = listener.local_addr()?;
        print(&format!("Serving on http://{address}/ until Ctrl-C. {note}\n"))?;
        serve(listener, pages(paths.clone(), access)).await
    });
    runtime.shutdown_background();
    served
}

async fn serve(listener: TcpListener, router: Router) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    tokio::select! {
        never = http_server::serve(listener, router, http_server::MOST_OF_PAGES) => match never {},
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// Which clients may use the pages, and a sentence for the user that says so.
fn access(args: &WebArgs) -> anyhow::Result<(Access, String)> {
    let given = args.token_file.as_deref().map(|file| read_token("--token-file", file)).transpose()?;
    match (Access::new(args.listen, given.clone()), &args.token_file) {
        (Some(access @ Access::Token(_)), Some(file)) => {
            Ok((access, format!("Log in with the token in {}.{}", file.display(), plain(args.listen))))
        }
        (Some(access), _) => Ok((access, "Every process of this node may look; nobody else.".to_owned())),
        (None, _) => {
            let token = Token::random()?;
            let note = format!("Log in with the token {}.{}", token.text(), plain(args.listen));
            Ok((Access::Token(token), note))
        }
    }
}

/// A warning, with advice, that the pages are not encrypted; empty for a loopback address.
fn plain(address: SocketAddr) -> &'static str {
    if address.ip().to_canonical().is_loopback() {
        ""
    } else {
        " The pages are not encrypted: in a network that you do not trust, listen on loopback and use a tunnel (ssh -L)."
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The sentence that `access` makes for these arguments, or its error.
    fn note(listen: &str, token: Option<&str>) -> String {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        if let Some(token) = token {
            fs::write(&file, token).unwrap();
        }
        let args = WebArgs { listen: listen.parse().unwrap(), token_file: token.map(|_| file) };
        access(&args).map_or_else(|error| format!("error: {error:#}"), |(_, note)| note)
    }

    #[test]
    fn output_says_who_may_look() {
        assert!(note("127.0.0.1:1", None).starts_with("Every process of this node may look"));
        let generated = note("0.0.0.0:1", None);
        assert!(
            generated.starts_with("Log in with the token ") && generated.contains("ssh -L"),
            "{generated}"
        );
        let given = note("[::]:1", Some("0123456789abcdef\n"));
        assert!(given.contains("/token.") && !given.contains("0123456789abcdef"), "{given}");
        assert!(note("127.0.0.1:1", Some("0123456789abcdef")).starts_with("Log in with"));
        let short = note("127.0.0.1:1", Some("short"));
        assert!(short.contains("error: ") && short.contains("the token has 5 characters"), "{short}");
    }
}
