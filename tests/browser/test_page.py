"""`postroad page` in a real browser, before a real network of five brokers with traffic."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from tests.worlds.page_network import HOSTILE, LINKED, OPERATOR, OUTPUT, VIEWER, PageNetwork, operating

import postroad

Window = Callable[..., Page]
VIEWS = ("Network", "Trace", "Subscriptions", "Queues", "Repair", "Discovery", "Clients", "Publish")
SOON_MS = 30_000
expect.set_options(timeout=SOON_MS)


def go(page: Page, view: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=view, exact=True).click()
    expect(page.get_by_role("heading", name=view, level=1)).to_be_visible()


def sign_in(page: Page, token: str = OPERATOR) -> None:
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("Token").fill(token)
    page.get_by_role("dialog").get_by_role("button", name="Sign in").click()


def signed_in(page: Page) -> None:
    sign_in(page)
    expect(page.get_by_text("Operator: ops")).to_be_visible()


def notice(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator(".q-notification").filter(has_text=text).first).to_be_visible()


# ---- views


def test_the_topology_is_drawn_and_a_broker_is_looked_at_by_mouse_and_keyboard(window: Window) -> None:
    page = window("/")
    drawing = page.get_by_role("group", name="Topology of the network")
    expect(drawing.get_by_role("button")).to_have_count(len(LINKED))
    expect(drawing.get_by_role("img")).to_have_count(sum(map(len, LINKED.values())))
    expect(
        drawing.get_by_role("button", name=re.compile(r"broker b3, load .*, [1-9][\d.]*.s in"))
    ).to_be_visible()
    drawing.get_by_role("button", name=re.compile("broker b3")).click()
    expect(page.get_by_role("heading", name="Broker b3")).to_be_visible()
    for caption in (
        "Links of this broker",
        "Clients connected here",
        "Subscriptions connected here",
        "Streams that pass here",
    ):
        expect(page.get_by_role("table", name=caption).locator("tbody tr").first).to_be_visible()
    expect(page.locator(".pr-facts")).to_contain_text("ring neighbours")
    expect(page.locator(".pr-facts")).to_contain_text("b1, b2, b4, b5")
    drawing.get_by_role("button", name=re.compile("broker b5")).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Broker b5")).to_be_visible()
    traffic = page.locator(".pr-lines").first
    expect(traffic).to_have_attribute("aria-label", re.compile(r"published \d"))


def test_a_message_is_traced_by_its_id_and_from_the_tail(window: Window, network: PageNetwork) -> None:
    async def publish() -> str:
        async with postroad.connect(network.address("b1"), name="tracer") as client:
            receipt = await client.publish("prices/traced", "x", {"n": 1})
            await client.flush()
            await asyncio.sleep(1)
            return str(receipt.id)

    page = window("/trace")
    page.get_by_label("Id of a message").fill(network.run(publish()))
    page.keyboard.press("Enter")
    expect(page.get_by_text("at b1, routed by 5 brokers, received by 5")).to_be_visible()
    expect(page.locator(".edge.sure")).to_have_count(4)
    expect(page.get_by_role("table", name="Route").locator("tbody tr")).to_have_count(5)
    expect(page.get_by_role("table", name="Receivers")).to_contain_text("b5-reader")
    page.get_by_role("button", name="Start tail").click()
    tail = page.get_by_role("table", name="The last messages")
    tail.get_by_role("button").first.click()
    expect(page.get_by_label("Id of a message")).to_have_value(re.compile("^[0-9a-f]{8}-"))
    expect(page.get_by_role("status").first).to_contain_text("Published by")
    page.get_by_role("button", name="Stop tail").click()
    expect(page.get_by_text("The tail is stopped.")).to_be_visible()
    page.get_by_label("Id of a message").fill("no id at all")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").first).to_contain_text("no id at all")


def test_subscriptions_are_shown_deleted_and_replayed(window: Window, network: PageNetwork) -> None:
    page = window("/subscriptions")
    table = page.get_by_role("table", name="Durable subscriptions")
    expect(table.get_by_role("row", name=re.compile("audit.*consolidated"))).to_be_visible()
    expect(table.get_by_role("row", name=re.compile(r"billing.*away\s+\d"))).to_be_visible()
    expect(table.get_by_role("button", name="Delete audit")).to_have_count(0)
    table.get_by_role("button", name="billing").click()
    expect(page.locator(".pr-lines")).to_have_attribute("aria-label", re.compile("latestDelivered.*released"))
    signed_in(page)
    table.get_by_role("button", name="Delete temporary").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    notice(page, "temporary is deleted")
    expect(table.get_by_role("row", name=re.compile("temporary"))).to_have_count(0)

    async def names() -> set[str]:
        async with operating(network, "b2") as client:
            return {row["name"] for row in (await client.request("subs"))["subscriptions"]}

    assert network.run(names()) == {"audit", "billing"}
    table.get_by_role("button", name="Replay audit").click()
    page.get_by_role("dialog").get_by_role("button", name="Replay").click()
    notice(page, "audit is being read: stop its consumers first")
    table.get_by_role("button", name="Replay billing").click()
    page.get_by_label("Since (UTC)").fill("2020-01-01T00:00")
    page.get_by_role("dialog").get_by_role("button", name="Replay").click()
    notice(page, "billing begins again at 2020-01-01 00:00 UTC")

    async def first() -> int:
        async with (
            operating(network, "b2") as client,
            client.subscribe("orders/#", durable="billing") as events,
        ):
            async for event in events:
                if isinstance(event, postroad.Event):
                    return int(str(event.attributes["n"]))
        return -1

    assert network.run(first()) == 1  # the very first order


def test_queues_are_shown_and_dead_letters_sent_again(window: Window, network: PageNetwork) -> None:
    async def bury() -> None:
        async with operating(network, "b1") as client:
            await client.application("shop").send("stock", HOSTILE, kind="transactional")
            async for message in client.application("stock").inbox():
                await message.reject(again=False, reason="no such thing")
                break

    network.run(bury())
    page = window("/queues")
    table = page.get_by_role("table", name="Inboxes")
    row = table.get_by_role("row", name=re.compile("stock"))
    expect(row).to_contain_text(re.compile(r"b\d"))
    expect(page.get_by_role("button", name="Send again stock")).to_have_count(0)
    signed_in(page)
    table.get_by_role("button", name="stock", exact=True).click()
    expect(page.get_by_role("table", name="Dead letters")).to_contain_text(HOSTILE)
    expect(page.get_by_role("table", name="Dead letters")).to_contain_text("no such thing")
    page.get_by_role("button", name="Send again stock").click()
    notice(page, "1 dead letters of stock sent again")
    expect(page.get_by_role("button", name="Send again stock")).to_have_count(0)


def test_repair_and_discovery(window: Window) -> None:
    page = window("/repair")
    expect(page.get_by_role("table", name="Subscribers that repair")).to_contain_text("shop")
    expect(page.locator(".pr-facts")).to_contain_text("hit ratio of caches")
    go(page, "Discovery")
    page.get_by_role("button", name="Search now").click()
    expect(page.get_by_role("status")).to_contain_text(re.compile(r"Chosen: b\d at 127.0.0.1"))
    expect(page.get_by_role("table", name="Brokers that answered")).to_contain_text("chosen")
    expect(page.get_by_role("table", name="Discovery of each broker").locator("tbody tr")).to_have_count(5)


def test_a_client_is_disconnected_and_comes_back(window: Window) -> None:
    page = window("/clients")
    signed_in(page)
    page.get_by_label("Search names, brokers, principals").fill("b4-reader")
    table = page.get_by_role("table", name="Clients")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.locator("tbody tr")).to_contain_text("anonymous")
    page.get_by_role("button", name="Disconnect b4-reader").click()
    page.get_by_role("dialog").get_by_role("button", name="Disconnect").click()
    notice(page, re.compile(r"connection \d+ at b4 is closed"))
    expect(table.get_by_role("row", name=re.compile(r"b4-reader.*[0-9] (ms|s)"))).to_be_visible()


def test_a_test_message_is_published_and_who_got_it_is_shown(window: Window) -> None:
    page = window("/publish")
    publish = page.get_by_role("main").get_by_role("button", name="Publish")
    expect(publish).to_be_disabled()
    signed_in(page)
    page.get_by_label("Topic").fill("prices/page")
    page.get_by_label("Attributes, as JSON").fill("[1]")
    publish.click()
    notice(page, "attributes are a JSON object")
    page.get_by_label("Attributes, as JSON").fill('{"n": 5}')
    publish.click()
    expect(page.get_by_text("at b3, routed by 5 brokers, received by 5")).to_be_visible()
    notice(page, "Published; 5 got it")


# ---- who may do what


def test_the_broker_decides_what_an_operator_may_do(window: Window, network: PageNetwork) -> None:
    page = window("/clients")
    expect(page.get_by_role("table", name="Clients").locator("tbody tr").first).to_be_visible()
    expect(page.locator(".pr-act")).to_have_count(0)
    sign_in(page, "a wrong token")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text(re.compile("token|denied", re.I))
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    sign_in(page, VIEWER)
    expect(page.get_by_text("Operator: viewer")).to_be_visible()
    page.get_by_role("button", name="Disconnect b1-reader").click()
    page.get_by_role("dialog").get_by_role("button", name="Disconnect").click()
    notice(page, "clients.kick needs the right `admin` at this broker")
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator(".pr-act")).to_have_count(0)
    assert VIEWER not in network.page.log.read_text()


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}]
)
def test_other_sites_cannot_use_the_page(network: PageNetwork, headers: dict[str, str]) -> None:
    request = urllib.request.Request(network.url, headers=headers)
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(request, timeout=10)
    refused.value.close()


def test_hostile_names_are_text(window: Window, network: PageNetwork) -> None:
    async def come() -> tuple[postroad.Client, str]:
        client = await postroad.connect(network.address("b3"), name=HOSTILE[:60])
        await client.subscribe(f"{HOSTILE.replace('#', '')}/#", durable=HOSTILE[:60])
        receipt = await client.publish("hostile/" + HOSTILE, HOSTILE, {"n": HOSTILE})
        await client.flush()
        return client, str(receipt.id)

    client, identity = network.run(come())
    try:
        page = window("/clients")
        expect(page.get_by_role("table", name="Clients")).to_contain_text(HOSTILE[:60])
        go(page, "Subscriptions")
        page.get_by_role("button", name=HOSTILE[:60]).click()
        expect(page.get_by_role("heading", name=HOSTILE[:60])).to_be_visible()
        go(page, "Network")
        page.get_by_role("table", name="Brokers").get_by_role("button", name="b3").click()
        expect(page.get_by_role("heading", name="Broker b3")).to_be_visible()
        go(page, "Trace")
        page.get_by_label("Id of a message").fill(identity + HOSTILE)
        page.keyboard.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("<img src=x")
        assert page.evaluate("window.harmed") is None
    finally:
        network.run(client.close())


# ---- how it looks, and for whom


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (400, "dark"),
        pytest.param(1400, "light", marks=pytest.mark.soak),
        pytest.param(1400, "dark", marks=pytest.mark.soak),
        pytest.param(400, "light", marks=pytest.mark.soak),
    ],
)
def test_every_view_is_accessible_and_fits_the_screen(window: Window, width: int, theme: str) -> None:
    page = window("/", width=width, height=850, theme=theme)
    expect(page.get_by_role("table", name="Brokers").locator("tbody tr")).to_have_count(5)
    sign_in(page)
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    broken = []
    for view in VIEWS:
        go(page, view)
        if view == "Network":
            page.get_by_role("table", name="Brokers").get_by_role("button", name="b3").click()
        elif view == "Subscriptions":
            page.get_by_role("button", name="billing", exact=True).click()
        elif view != "Discovery":
            expect(page.locator("svg, .pr-grid tbody tr").first).to_be_attached()
        page.wait_for_timeout(300)  # for what moves into its place
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, (view, wide)
        page.screenshot(path=OUTPUT / f"{view.lower()}-{width}-{theme}.png", full_page=True)
        for violation in Axe().run(page).response["violations"]:
            places = [node["html"][:160] for node in violation["nodes"][:3]]
            broken.append((view, violation["id"], violation["impact"], places))
    assert not broken, "\n".join(map(str, broken))


def test_the_colours_are_chosen_and_remembered(window: Window) -> None:
    page = window("/", theme="dark")
    expect(page.locator("body.body--dark")).to_be_attached()
    page.get_by_role("button", name="Colours: as the system").click()
    expect(page.locator("body.body--light")).to_be_attached()
    page.reload()
    expect(page.locator("body.body--light")).to_be_attached()
    expect(page.get_by_role("button", name="Colours: light")).to_be_visible()


# ---- what goes wrong


def test_nothing_is_lost_when_the_browser_was_offline(window: Window) -> None:
    page = window("/publish")
    page.get_by_label("Payload").fill("what I was writing")
    page.context.set_offline(True)
    page.wait_for_timeout(1_000)
    page.context.set_offline(False)
    summary = page.locator(".pr-summary")
    before = summary.inner_text()
    expect(summary).not_to_have_text(before)  # it goes on
    expect(page.get_by_label("Payload")).to_have_value("what I was writing")


@pytest.mark.parametrize("name", ["b3", pytest.param("b5", marks=pytest.mark.soak)])
def test_a_broker_is_killed_while_it_is_looked_at(window: Window, network: PageNetwork, name: str) -> None:
    """b3 is the one that the page was connected to at first: it goes on at another."""
    page = window("/")
    drawing = page.get_by_role("group", name="Topology of the network")
    drawing.get_by_role("button", name=re.compile(f"broker {name}, load")).click()
    network.by_name[name].kill()
    expect(drawing.get_by_role("button", name=f"broker {name}, does not answer")).to_be_visible()
    expect(page.get_by_role("alert").first).to_contain_text(f"{name} does not answer.")
    expect(page.get_by_role("heading", name=f"Broker {name}")).to_be_visible()
    network.by_name[name].start()
    expect(page.get_by_role("alert").first).to_be_hidden()
    expect(page.get_by_role("table", name="Brokers").locator("tbody tr")).to_have_count(5)
