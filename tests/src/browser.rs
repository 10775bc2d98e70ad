//! A browser without a screen: Debian's chromium, driven by the WebDriver protocol (W3C) through chromedriver.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{cleanup::Cleanup, netns::Netns, wait_for};

/// Name and version of the npm package (axe-core) that finds accessibility problems of a page. `cargo xtask setup`
/// unpacks this package in the cache of xtask.
pub const AXE: &str = "axe-core-4.14.1";

/// Address of chromedriver in the browser's namespace.
const DRIVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9515);
/// Timeout of one command of chromedriver, and of its start. (While two busy loops run on the machine, a script that
/// waits for 240 frames takes more than two minutes.)
const PATIENCE: Duration = Duration::from_secs(300);
/// Arguments of the browser, which make it show only the pages of the tests and send no requests of its own.
const ARGUMENTS: [&str; 12] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-proxy-server",
];

/// A running browser with one page. Dropping this ends the browser.
#[derive(Debug)]
pub struct Browser {
    netns: Netns,
    session: String,
    driver: Option<(Child, Cleanup)>,
}

impl Browser {
    /// Starts a browser in `netns`, whose loopback device must be up. The browser creates a new profile in `folder`.
    pub fn start(netns: &Netns, folder: &Path) -> Result<Self> {
        let mut command = netns.command("chromedriver");
        command.arg(format!("--port={}", DRIVER.port())).stdout(Stdio::null()).stderr(Stdio::null());
        let driver = Cleanup::spawn(&mut command)
            .context("starting chromedriver: `cargo xtask setup` installs chromium-driver")?;
        let mut browser = Self { netns: netns.clone(), session: String::new(), driver: Some(driver) };
        let ready = wait_for(PATIENCE, || browser.send("GET", "/status", &Value::Null).ok());
        ready.context("chromedriver does not answer")?;
        let profile: PathBuf = folder.join("browser");
        let data = format!("--user-data-dir={}", profile.display());
        let arguments: Vec<&str> = ARGUMENTS.into_iter().chain([data.as_str()]).collect();
        let capabilities = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let answer = browser.send("POST", "/session", &capabilities).context("starting chromium")?;
        browser.session = answer["sessionId"].as_str().context("a session has an id")?.to_owned();
        browser.ask("/timeouts", &json!({ "script": PATIENCE.as_millis() }))?;
        Ok(browser)
    }

    /// Opens an address and waits until its document is loaded.
    pub fn open(&self, url: &str) -> Result<()> {
        self.ask("/url", &json!({ "url": url })).map(drop)
    }

    /// Runs `script`, the body of a function, in the page; returns its result. If the result is a promise, waits
    /// for its value.
    pub fn run(&self, script: &str) -> Result<Value> {
        self.ask("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Sets the size of the page in CSS pixels, and whether the user prefers dark colours.
    pub fn resize(&self, (width, height): (u32, u32), dark: bool) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &size)?;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &media)
    }

    /// A PNG image of the visible part of the page.
    pub fn screenshot(&self) -> Result<Vec<u8>> {
        let answer = self.send("GET", &format!("/session/{}/screenshot", self.session), &Value::Null)?;
        Ok(STANDARD.decode(answer.as_str().context("a screenshot is text")?)?)
    }

    /// Errors of the page since the last call: exceptions, blocked files, violations of the content security policy.
    pub fn errors(&self) -> Result<Vec<String>> {
        let entries = self.ask("/se/log", &json!({ "type": "browser" }))?;
        let entries = entries.as_array().cloned().unwrap_or_default();
        let severe = entries.iter().filter(|entry| entry["level"] == "SEVERE");
        Ok(severe.map(|entry| entry["message"].to_string()).collect())
    }

    /// Sends key presses to the element that has the focus.
    pub fn press(&self, keys: &str) -> Result<()> {
        let actions = keys.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|kind| json!({ "type": kind, "value": key.to_string() }))
        });
        let actions: Vec<Value> = actions.collect();
        let actions = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": actions }] });
        self.ask("/actions", &actions).map(drop)
    }

    fn devtools(&self, command: &str, parameters: &Value) -> Result<()> {
        self.ask("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters })).map(drop)
    }

    fn ask(&self, path: &str, body: &Value) -> Result<Value> {
        self.send("POST", &format!("/session/{}{path}", self.session), body)
    }

    fn send(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let text = exchange(&self.netns, method, path, body).with_context(|| format!("{method} {path}"))?;
        let mut answer: Value = serde_json::from_str(&text)?;
        let value = answer["value"].take();
        if let Some(error) = value["error"].as_str() {
            bail!("{error}: {}", value["message"].as_str().unwrap_or_default());
        }
        Ok(value)
    }
}

/// Sends an HTTP request to chromedriver; returns the body of its answer.
fn exchange(netns: &Netns, method: &str, path: &str, body: &Value) -> io::Result<String> {
    let mut stream = netns.run(|| TcpStream::connect_timeout(&DRIVER, PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    // chromedriver keeps the connection open, so the answer ends where its header says.
    let (mut text, mut part) = (Vec::new(), [0; 16 << 10]);
    loop {
        if let Some(body) = complete(&text) {
            return Ok(body);
        }
        match stream.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => text.extend_from_slice(&part[..length]),
        }
    }
}

/// The body of an answer, once it has arrived completely; `None` before.
fn complete(bytes: &[u8]) -> Option<String> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"))?.trim().parse().ok()?;
    let body = bytes[end + 4..].get(..length)?;
    Some(String::from_utf8_lossy(body).into_owned())
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty()
            && let Err(error) = self.send("DELETE", &format!("/session/{}", self.session), &Value::Null)
        {
            eprintln!("cannot end the browser: {error:#}");
        }
        if let Some((mut driver, cleanup)) = self.driver.take() {
            driver.kill().and_then(|()| driver.wait()).map(drop).unwrap_or_default();
            cleanup.disarm();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::complete;

    #[test]
    fn answer_ends_where_its_head_says() {
        let head = b"HTTP/1.1 200 OK\r\nContent-Length:5\r\n\r\n".as_slice();
        assert_eq!(complete(&head[..20]), None);
        assert_eq!(complete(&[head, b"abc"].concat()), None);
        assert_eq!(complete(&[head, b"abcdef"].concat()).as_deref(), Some("abcde"));
    }
}
