//! The files that browsers load, inside the binary.

use axum::{
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};

/// A static file that the server sends to browsers, embedded in the binary.
struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// Lists files of the folder `assets`.
macro_rules! assets {
    ($($name:literal $kind:expr,)*) => {
        const ASSETS: &[Asset] =
            &[$(Asset { name: $name, kind: $kind, bytes: include_bytes!(concat!("../assets/", $name)) },)*];
    };
}

assets! {
    "style.css" STYLE,
    "icon.svg" "image/svg+xml",
    "uplot/uPlot.iife.min.js" SCRIPT,
    "uplot/uPlot.min.css" STYLE,
    "uplot/LICENSE" "text/plain; charset=utf-8",
    "app.js" SCRIPT,
    "dom.js" SCRIPT,
    "format.js" SCRIPT,
    "health.js" SCRIPT,
    "plots.js" SCRIPT,
    "pages/overview.js" SCRIPT,
    "pages/services.js" SCRIPT,
    "pages/service.js" SCRIPT,
    "pages/connections.js" SCRIPT,
    "pages/explain.js" SCRIPT,
    "pages/live.js" SCRIPT,
}

/// The HTML document of all pages except the login and the documentation. Its script builds the page.
const INDEX: &str = include_str!("../assets/index.html");
/// The page that asks for the token.
const LOGIN: &str = include_str!("../assets/login.html");
/// What the page of the login says after a wrong token.
const WRONG_TOKEN: &str = "<p class=\"wrong\" role=\"alert\">This is not the token of this server.</p>";

/// The HTML document of all pages except the login and the documentation.
pub(crate) fn index() -> Response {
    html(StatusCode::OK, INDEX.to_owned())
}

/// The page that asks for the token.
pub(crate) fn login(wrong: bool) -> Response {
    let status = if wrong { StatusCode::FORBIDDEN } else { StatusCode::OK };
    html(status, LOGIN.replace("<!-- wrong -->", if wrong { WRONG_TOKEN } else { "" }))
}

fn html(status: StatusCode, text: String) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CACHE_CONTROL, "no-store")];
    (status, headers, text).into_response()
}

/// A file of the binary. Browsers ask each time whether their copy is still current.
pub(crate) fn file(name: &str, headers: &HeaderMap) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    unless_known(asset.kind, asset.bytes, headers)
}

/// The content, unless the browser's copy is still current.
pub(crate) fn unless_known(
    kind: &'static str,
    content: impl AsRef<[u8]> + IntoResponse,
    headers: &HeaderMap,
) -> Response {
    let tag = format!("\"{}-{:x}\"", env!("CARGO_PKG_VERSION"), digest(content.as_ref()));
    let head = [
        (header::CONTENT_TYPE, kind.to_owned()),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
        (header::ETAG, tag.clone()),
    ];
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    if known { (StatusCode::NOT_MODIFIED, head).into_response() } else { (head, content).into_response() }
}

/// FNV-1a: tells two versions of a file apart.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// The files below a folder of `assets`.
    fn files(folder: &Path) -> Vec<String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let mut names = Vec::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                names.extend(files(&path));
            } else {
                names.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
            }
        }
        names
    }

    #[test]
    fn every_file_of_the_folder_is_served() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        for name in files(&root) {
            let is_page = ["index.html", "login.html", "docs.html"].contains(&name.as_str());
            assert!(is_page || ASSETS.iter().any(|asset| asset.name == name), "{name}");
        }
    }

    #[test]
    fn all_files_together_have_less_than_200_kb() {
        let sum: usize = ASSETS.iter().map(|asset| asset.bytes.len()).sum();
        assert!(sum + INDEX.len() + LOGIN.len() < 200_000, "{sum} bytes");
    }

    #[test]
    fn files_load_nothing_from_elsewhere_and_have_no_inline_code() {
        let ours = ASSETS.iter().filter(|asset| !asset.name.starts_with("uplot/"));
        let mut texts: Vec<(&str, &str)> =
            ours.map(|asset| (asset.name, std::str::from_utf8(asset.bytes).unwrap())).collect();
        texts.extend([("index.html", INDEX), ("login.html", LOGIN)]);
        for (name, text) in texts {
            let foreign = text.match_indices("://").filter(|(at, _)| {
                !text[..*at].ends_with("http") || !text[*at..].starts_with("://www.w3.org/")
            });
            assert_eq!(foreign.count(), 0, "{name} names another server");
            for inline in ["<style", " style=\"", "onclick=", "javascript:", "innerHTML", "eval("] {
                assert!(!text.contains(inline), "{name} has {inline}");
            }
        }
        for page in [INDEX, LOGIN] {
            let scripts = page.matches("<script").count();
            assert_eq!(
                scripts,
                page.matches("<script src=").count() + page.matches("<script type=\"module\" src=").count()
            );
        }
    }
}
