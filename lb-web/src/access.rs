//! Who may see the pages: if the server has a token, users who have that token; if the server has no token, which is
//! possible only on loopback, every process of the node.
//!
//! A page from the Internet must not read our pages through the user's browser. The browser keeps other origins from
//! reading our answers, except when the owner of a domain name makes it resolve to 127.0.0.1 (DNS rebinding). So
//! without a token, requests must name the loopback host. With a token, they need not: the browser sends our cookie
//! only to the host name where the user has logged in.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, HeaderValue, Uri, header};
use ring::{
    hmac,
    rand::{SecureRandom as _, SystemRandom},
};
use thiserror::Error;

/// Name of the cookie of a session.
const COOKIE: &str = "lb_session";
/// Minimum number of characters of a token.
const SHORTEST: usize = 16;
/// The text whose HMAC with the token is the cookie.
const SESSION: &[u8] = b"lb-agent web session";

/// Why a text is no token.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TokenError {
    /// The token is too short.
    #[error(
        "the token has {0} characters: it needs at least {SHORTEST}, such as those of `openssl rand -hex 16`"
    )]
    Short(usize),
    /// The system has no random numbers.
    #[error("the kernel gives no random bytes for a token")]
    Random,
}

/// The secret that users type to see the pages.
#[derive(Clone)]
pub struct Token {
    text: String,
    key: hmac::Key,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// A token from the text of a file; white space around it does not count.
    ///
    /// # Errors
    /// The text is too short.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        let length = text.chars().count();
        if length < SHORTEST {
            return Err(TokenError::Short(length));
        }
        Ok(Self { text: text.to_owned(), key: hmac::Key::new(hmac::HMAC_SHA256, text.as_bytes()) })
    }

    /// A new random token.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn random() -> Result<Self, TokenError> {
        let mut bytes = [0_u8; 16];
        SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| TokenError::Random)?;
        Self::new(&hex(&bytes))
    }

    /// The text that users type.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether `text`, without white space around it, is the token. The comparison takes the same time wherever the
    /// texts differ: it compares digests.
    fn is(&self, text: &str) -> bool {
        let digest = hmac::sign(&self.key, text.trim().as_bytes());
        hmac::verify(&self.key, self.text.as_bytes(), digest.as_ref()).is_ok()
    }

    /// The value of the cookie: it proves that the user had the token, and does not contain the token.
    fn session(&self) -> String {
        hex(hmac::sign(&self.key, SESSION).as_ref())
    }

    fn is_session(&self, text: &str) -> bool {
        let digest = hmac::sign(&self.key, text.as_bytes());
        hmac::verify(&self.key, self.session().as_bytes(), digest.as_ref()).is_ok()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Who may look at the pages.
#[derive(Clone, Debug)]
pub enum Access {
    /// Every process of the node; only for a server on a loopback address.
    Loopback,
    /// Users who have the token.
    Token(Token),
}

/// Whether a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Allowed,
    /// The server has no token, and the request names a host other than loopback: see the module.
    WrongHost,
    /// A page of another site requests data (a path below `/api/`).
    OtherSite,
    /// The user has to log in.
    LoginRequired,
}

impl Access {
    /// The access to a server on this address; `None` if there is no token and the address is not a loopback address.
    pub fn new(address: SocketAddr, token: Option<Token>) -> Option<Self> {
        match token {
            Some(token) => Some(Self::Token(token)),
            None => address.ip().to_canonical().is_loopback().then_some(Self::Loopback),
        }
    }

    /// Whether the request is answered.
    pub(crate) fn admits(&self, uri: &Uri, headers: &HeaderMap) -> Admission {
        if matches!(self, Self::Loopback) && !names_loopback(uri, headers) {
            return Admission::WrongHost;
        }
        // Browsers say which site makes a request. Any site may link to our pages, but only our pages may fetch data.
        let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
        if uri.path().starts_with("/api/")
            && site.is_some_and(|site| site != b"same-origin" && site != b"none")
        {
            return Admission::OtherSite;
        }
        match self {
            Self::Loopback => Admission::Allowed,
            Self::Token(token) if has_token(token, headers) => Admission::Allowed,
            Self::Token(_) => Admission::LoginRequired,
        }
    }

    /// The header `Set-Cookie` for a user who typed this text; `None` if the text is not the token, or the server has
    /// no token.
    pub(crate) fn log_in(&self, typed: &str) -> Option<String> {
        let Self::Token(token) = self else { return None };
        let session = token.is(typed).then(|| token.session())?;
        Some(format!("{COOKIE}={session}; Path=/; HttpOnly; SameSite=Strict"))
    }
}

/// Whether the request is for `localhost` or a loopback address, at any port: tunnels may listen on another port.
fn names_loopback(uri: &Uri, headers: &HeaderMap) -> bool {
    let of_header = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let Some(authority) = uri.authority().map(|authority| authority.as_str()).or(of_header) else {
        return false;
    };
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() => host,
        _ => authority,
    };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Whether the request has the cookie of a session, or `Authorization: Bearer TOKEN`.
fn has_token(token: &Token, headers: &HeaderMap) -> bool {
    let values = |name| headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    let mut cookies = values(header::COOKIE)
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    cookies.any(|(name, value)| name == COOKIE && token.is_session(value))
        || values(header::AUTHORIZATION)
            .filter_map(|value| value.strip_prefix("Bearer "))
            .any(|text| token.is(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "a secret of enough characters";

    fn asked(access: &Access, path: &str, headers: &[(&'static str, &str)]) -> Admission {
        let headers =
            headers.iter().map(|(name, value)| ((*name).try_into().unwrap(), value.parse().unwrap()));
        access.admits(&path.parse().unwrap(), &headers.collect())
    }

    #[test]
    fn only_loopback_needs_no_token() {
        let access = |address: &str| Access::new(address.parse().unwrap(), None).is_some();
        assert!(access("127.0.0.1:8088") && access("[::1]:8088") && access("127.0.0.53:1"));
        assert!(!access("0.0.0.0:8088") && !access("[::]:8088") && !access("192.0.2.1:8088"));
    }

    #[test]
    fn loopback_answers_only_to_its_own_names() {
        for host in ["localhost", "LocalHost:8088", "127.0.0.1:8088", "127.0.0.1", "[::1]:8088", "[::1]"] {
            assert_eq!(asked(&Access::Loopback, "/", &[("host", host)]), Admission::Allowed, "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8088",
            "localhost.evil.example",
            "192.0.2.1:8088",
            "127.0.0.1.x",
            "",
        ] {
            assert_eq!(asked(&Access::Loopback, "/", &[("host", host)]), Admission::WrongHost, "{host}");
        }
        assert_eq!(asked(&Access::Loopback, "/", &[]), Admission::WrongHost, "no host");
    }

    #[test]
    fn other_sites_get_no_data() {
        let from =
            |site, path| asked(&Access::Loopback, path, &[("host", "localhost"), ("sec-fetch-site", site)]);
        for (site, expected) in [
            ("same-origin", Admission::Allowed),
            ("none", Admission::Allowed),
            ("cross-site", Admission::OtherSite),
            ("same-site", Admission::OtherSite),
        ] {
            assert_eq!(from(site, "/api/live"), expected, "{site}");
        }
        assert_eq!(from("cross-site", "/services"), Admission::Allowed, "a link to a page");
    }

    #[test]
    fn token_or_its_cookie_is_required() {
        let access = Access::Token(Token::new(SECRET).unwrap());
        let with =
            |name, value: &str| asked(&access, "/api/overview", &[("host", "192.0.2.1"), (name, value)]);
        assert_eq!(with("accept", "*/*"), Admission::LoginRequired);
        assert_eq!(with("authorization", &format!("Bearer {SECRET}")), Admission::Allowed);
        assert_eq!(with("authorization", &format!("Bearer {SECRET}x")), Admission::LoginRequired);
        assert_eq!(with("cookie", &format!("{COOKIE}={SECRET}")), Admission::LoginRequired, "no raw token");
        let cookie = access.log_in(&format!(" {SECRET}\n")).unwrap();
        assert!(
            cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict") && !cookie.contains(SECRET),
            "{cookie}"
        );
        let (pair, _) = cookie.split_once(';').unwrap();
        assert_eq!(with("cookie", &format!("a=b; {pair}")), Admission::Allowed);
        assert_eq!(access.log_in("another secret of many characters"), None);
        let other = Access::Token(Token::new("another secret of many characters").unwrap());
        let of_other = other.log_in("another secret of many characters").unwrap();
        assert_eq!(with("cookie", of_other.split_once(';').unwrap().0), Admission::LoginRequired);
    }

    #[test]
    fn short_tokens_are_rejected() {
        assert_eq!(Token::new(" short\n").unwrap_err(), TokenError::Short(5));
        let [one, other] = [Token::random(), Token::random()].map(Result::unwrap);
        assert_eq!(one.text().len(), 32);
        assert_ne!(one.text(), other.text());
    }
}
